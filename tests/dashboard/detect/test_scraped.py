"""Incidents from scrapes: F16 and its silent kin as they happen, restarts, targets that go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from metrics_pages import GB, page

from kvlens.dashboard.detect.scraped import Scraped
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.scrape.reading import read_page

START = 1_796_000_000.0
STEP = 15.0


def scrapes(
    number: int, first: int = 0, started: float = START, **rates: float
) -> Iterator[Scrape]:
    """One scrape per 15 s of a server whose counters rise by ``rates`` a second."""
    shape: dict[str, float] = {"stored": GB, "asked": 3_500, "hits": 0, "local": 7_000,
                               "local_hits": 2_500, "usage": 0.97, "loaded": 0}  # fmt: skip
    shape |= rates
    for index in range(first, first + number):
        at = index * STEP
        up = at + START - started
        text = page(
            stored=40 * GB + shape["stored"] * up,
            loaded=shape["loaded"] * up if shape["loaded"] else None,
            external=(1e5 + shape["asked"] * up, shape["hits"] * up),
            local=(1e6 + shape["local"] * up, 3e5 + shape["local_hits"] * up),
            usage=shape["usage"], started=started,
        )  # fmt: skip
        yield Scrape(target="node-a:8000", time=START + at, readings=read_page(text))


def feed(detector: Scraped, stream: Iterator[Scrape], told: bool = False) -> list[Incident]:
    return [incident for scrape in stream for incident in detector.take(scrape, lambda _: told)]


def test_f16_opens_after_ten_minutes_and_stays_one() -> None:
    found = feed(Scraped(), scrapes(100))
    assert {(i.kind, i.severity, i.confidence, i.state) for i in found} == {
        ("zero_hit", "critical", "likely", "open")
    }
    assert len({incident.id for incident in found}) == 1
    first = found[0]
    assert 540 <= first.opened_at - START <= 615
    assert (first.engine_id, first.model) == ("node-a:8000/0", "m")
    assert first.summary.startswith("503 GiB were stored")
    assert len(found) <= 1 + (100 * STEP - 540) / 60  # told once a minute, not each 15 s


@pytest.mark.parametrize("rates", [
    {"usage": 0.31},  # N1
    {"hits": 500, "loaded": 1e8},  # N3
    {"local_hits": 0},  # N4
    {"stored": 0},
    {"asked": 0},
])  # fmt: skip
def test_silence(rates: dict[str, Any]) -> None:
    if rates.get("local_hits") == 0:
        stream = (
            Scrape(target="t", time=START + n * STEP, readings=read_page(
                page(stored=n * GB, external=(n * 5e4, 0), local=(n * 5e4, 0), usage=0.97)))
            for n in range(200)
        )  # fmt: skip
        assert feed(Scraped(), stream) == []
    else:
        assert feed(Scraped(), scrapes(200, **rates)) == []


def test_the_first_minutes_are_cold() -> None:
    assert feed(Scraped(), scrapes(36)) == []  # N5


def test_a_hit_closes_it() -> None:
    detector = Scraped()
    feed(detector, scrapes(60))
    closed = feed(detector, scrapes(3, first=60, hits=10))
    assert [(i.state, i.close_reason) for i in closed] == [("closed", "recovered")]


def test_a_restart_closes_it_and_begins_anew() -> None:
    """N7: counters that fall are no regression."""
    detector = Scraped()
    opened = feed(detector, scrapes(60))
    after = feed(detector, scrapes(36, first=60, started=START + 60 * STEP))
    assert [(i.state, i.close_reason, i.id == opened[0].id) for i in after] == [
        ("closed", "engine_gone", True)
    ]


def test_an_idle_server_stays_as_it_was() -> None:
    detector = Scraped()
    assert feed(detector, scrapes(60))[-1].state == "open"
    last = next(scrapes(1, first=59))
    idle = (Scrape(target="node-a:8000", time=START + n * STEP, readings=last.readings)
            for n in range(60, 200))  # fmt: skip
    assert all(incident.state == "open" for incident in feed(detector, idle))


def test_state_survives_a_restart_of_ours() -> None:
    stream = list(scrapes(100))
    whole = feed(Scraped(), iter(stream))
    for cut in (1, 2, 30, 41, 80):
        before = Scraped()
        first = feed(before, iter(stream[:cut]))
        after = Scraped()
        for key in before.dirty:
            after.load(key, before.dump(key) or b"")
        assert first + feed(after, iter(stream[cut:])) == whole


def test_a_target_that_falls_silent_and_comes_back() -> None:
    detector = Scraped()
    feed(detector, scrapes(2, usage=0.2))
    down = [Scrape(target="node-a:8000", time=START + 15 + n * STEP, error="no answer")
            for n in range(1, 40)]  # fmt: skip
    (silent,) = feed(detector, iter(down))
    assert (silent.kind, silent.severity) == ("telemetry_lost", "warning")
    assert "has not answered for 300 s: no answer" in silent.summary
    back = feed(detector, scrapes(3, first=60, usage=0.2))
    assert [(i.kind, i.close_reason) for i in back] == [("telemetry_lost", "recovered")]


def test_a_target_that_is_taken_away_ends_its_incidents() -> None:
    detector = Scraped()
    feed(detector, scrapes(60))
    gone = detector.take(Scrape(target="node-a:8000", time=START + 9e3, gone=True), lambda _: True)
    assert [(i.kind, i.close_reason) for i in gone] == [("zero_hit", "engine_gone")]
    assert detector.dump("node-a:8000/0") is None


def test_a_target_that_never_answered_is_no_incident() -> None:
    down = (Scrape(target="x", time=START + n * STEP, error="refused") for n in range(100))
    assert feed(Scraped(), down) == []


def instrumented(second: int, **more: float) -> Scrape:
    own = 'engine="0",model_name="m"'
    lines = [f"kvlens_expected_tokens_total{{{own}}} {second * 1024}",
             f"kvlens_served_tokens_total{{{own}}} 0",
             f'kvlens_requests_total{{{own},verdict="lost"}} {second}',
             f'kvlens_lost_tokens_total{{{own},cause="drafter_fallback"}} {second * 1024}',
             *(f"{name}{{{own}}} {value}" for name, value in more.items())]  # fmt: skip
    text = page(stored=GB, external=(second * 1100, 0)) + "\n".join(lines) + "\n"
    return Scrape(target="t", time=START + second, readings=read_page(text))


def test_an_instrumented_engine_without_records_is_judged_by_its_numbers() -> None:
    found = feed(Scraped(), (instrumented(n * 15) for n in range(5)))
    assert [(i.kind, i.confidence, i.cause) for i in found] == [
        ("zero_hit", "certain", "drafter_fallback")
    ]


def test_one_that_sends_records_is_left_to_them_but_for_what_they_cannot_tell() -> None:
    stream = [instrumented(n * 15, kvlens_dropped_spans_total=n // 4) for n in range(6)]
    assert [i.kind for i in feed(Scraped(), iter(stream), told=True)] == ["telemetry_lost"]
