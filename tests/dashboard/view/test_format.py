from urllib.parse import parse_qsl, urlsplit

import pytest

from kvlens.dashboard.model.totals import Point, Totals, add_up
from kvlens.dashboard.view import format
from kvlens.dashboard.web.charts import TimeRange, token_chart
from kvlens.dashboard.web.request_form import RequestForm


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: format.count(1234567), "1,234,567"),
        (lambda: format.count(None), format.NONE),
        (lambda: format.compact(9_999), "9,999"),
        (lambda: format.compact(12_288), "12.3 k"),
        (lambda: format.compact(2_100_000), "2.1 M"),
        (lambda: format.compact(3.2e9), "3.2 G"),
        (lambda: format.percent(0, 0), format.NONE),
        (lambda: format.percent(1, 100_000), "< 0.1 %"),
        (lambda: format.percent(99_999, 100_000), "> 99.9 %"),
        (lambda: format.percent(1, 1), "100 %"),
        (lambda: format.percent(1, 30), "3.3 %"),
        (lambda: format.size(0), "0 B"),
        (lambda: format.size(10_485_760), "10 MiB"),
        (lambda: format.size(11.24 * 1024**3), "11.2 GiB"),
        (lambda: format.duration(31e-6), "31 µs"),
        (lambda: format.duration(0.04), "40 ms"),
        (lambda: format.duration(18.91), "18.9 s"),
        (lambda: format.duration(373), "6.22 min"),
        (lambda: format.duration(0), "0 s"),
        (lambda: format.utc(0), "1970-01-01 00:00:00 UTC"),
        (lambda: format.utc(1e30), "9999-12-31 23:59:59 UTC"),
        (lambda: format.clock(1.5), "00:00:01.500"),
        (lambda: format.ago(100, 101), "just now"),
        (lambda: format.ago(100, 219), "119 s ago"),
        (lambda: format.ago(100, 221), "2 min ago"),
        (lambda: format.ago(100, 90), "in 10 s"),
        (lambda: format.ago(None, 90), format.NONE),
        (lambda: format.stamp(3600, 7200), "01:00:00"),
        (lambda: format.stamp(3600, 90_000), "1970-01-01 01:00"),
        (lambda: format.plural(1, "chunk"), "1 chunk"),
        (lambda: format.plural(4096, "chunk"), "4,096 chunks"),
        (lambda: format.short("abcdefgh", 4), "abcd…"),
        (lambda: format.path("a/b?c#d"), "a%2Fb%3Fc%23d"),
    ],
)
def test_text(call, text: str) -> None:  # type: ignore[no-untyped-def]
    assert call() == text


def test_filters_read_write_and_name_what_they_ignore() -> None:
    good = RequestForm.parse({"verdict": "lost", "range": "24h", "min_lost": "512", "cursor": "x"})
    query = good.query(now=100_000)
    assert (query.verdicts, query.since, query.min_lost_tokens) == (("lost",), 13_600, 512)
    assert good.active
    assert good.link("next") == "/requests?verdict=lost&range=24h&min_lost=512&cursor=next"
    bad = RequestForm.parse({"verdict": "lots", "min_lost": "-1", "range": "2y", "cause": " "})
    assert [error.split()[0] for error in bad.errors] == ["verdict", "range", "min_lost"]
    assert not bad.active
    assert bad.link() == "/requests"


def test_window_covers_now_in_whole_steps() -> None:
    for name in ("1h", "6h", "24h", "7d", "nonsense"):
        window = TimeRange.named(name, 1_790_000_123.4)
        assert window.until > 1_790_000_123.4
        assert window.step % 60 == 0
        assert (window.until - window.since) / window.step <= 97
    assert TimeRange.named("nonsense", 0).name == "24h"


def test_chart_stacks_lost_on_served_and_is_absent_without_tokens() -> None:
    window = TimeRange.named("1h", 3600)
    points = [
        Point(time=int(window.since), served_tokens=300, lost_tokens=100, requests={"lost": 1}),
        Point(time=int(window.since) + 60, served_tokens=200),
    ]
    chart = token_chart(points, window)
    assert chart is not None
    assert chart.top == 400
    assert (chart.bars[0].lost_y, chart.bars[0].served_y) == ("0.00%", "25.00%")
    assert token_chart([Point(time=0)], window) is None


def test_totals_add_up_with_their_buckets() -> None:
    one = Totals(requests={"lost": 1}, lost_tokens=5, loads=1, reload_buckets=[1, 0])
    two = Totals(requests={"lost": 2, "full": 1}, lost_tokens=7, reload_buckets=[0, 2])
    total = add_up([one, two])
    assert total.requests == {"lost": 3, "full": 1}
    assert (total.lost_tokens, total.loads, total.reload_buckets) == (12, 1, [1, 2])


def test_times_of_a_link_from_elsewhere_narrow_the_list() -> None:
    times = {"since": "2026-09-07T12:00:00.000Z", "until": "1789000000"}
    linked = RequestForm.parse(times)
    query = linked.query(now=0.0)
    assert (query.since, query.until) == (1788782400.0, 1789000000.0)
    assert RequestForm.parse(dict(parse_qsl(urlsplit(linked.link()).query))) == linked
    named = RequestForm.parse({**times, "range": "1h"}).query(now=7200.0)
    assert (named.since, named.until) == (3600.0, None)
    assert "since is Unix seconds" in RequestForm.parse({"since": "yesterday"}).errors[0]
