"""The second set of field cases as they happen: scrapes that the dashboard takes by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from metrics_pages import GB, page

from kvlens.dashboard.detect.scraped import Scraped
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.scrape.reading import read_page

START = 1_796_000_000.0
STEP = 15.0
PROMOTIONS = "vllm_kv_offload_tiering_promotion_allocation_failures_total"


def stream(number: int, first: int = 0, usage: float = 0.97, **rates: float) -> Iterator[Scrape]:
    """One scrape per 15 s; a rate per second for each of ``page``'s numbers."""
    plain = {name: rates.pop(name, None) for name in ("stored", "loaded")}
    asked, hits, local, local_hits = (
        rates.pop(name, 0.0) for name in ("asked", "hits", "local", "local_hits")
    )
    for index in range(first, first + number):
        up = index * STEP
        text = page(
            external=(asked * up, hits * up), local=(local * up, local_hits * up), usage=usage,
            **{name: None if rate is None else rate * up for name, rate in plain.items()},
            **{name: rate * up for name, rate in rates.items()},
        )  # fmt: skip
        yield Scrape(target="node-a:8000", time=START + up, readings=read_page(text))


def feed(detector: Scraped, scrapes: Iterator[Scrape]) -> list[Incident]:
    return [incident for scrape in scrapes for incident in detector.take(scrape, lambda _: False)]


def kinds(found: list[Incident]) -> set[tuple[str, str, str]]:
    return {(item.kind, item.severity, item.confidence) for item in found}


def test_f21_stays_silent() -> None:
    rates = {"stored": 3e7, "asked": 900, "local": 1_300, "local_hits": 380,
             "vllm_num_preemptions_total": 0.6}  # fmt: skip
    assert feed(Scraped(), stream(200, usage=0.99, **rates)) == []


def test_f22_opens_as_a_warning_becomes_critical_and_closes_with_the_first_store() -> None:
    detector = Scraped()
    found = feed(detector, stream(60, stored=0, asked=9_000, local=15_000, local_hits=6_000))
    assert [item.kind for item in found] == ["nothing_stored"] * len(found)
    assert (found[0].severity, found[-1].severity) == ("warning", "critical")
    assert len({item.id for item in found}) == 1
    closed = feed(detector, stream(2, 60, stored=GB, asked=9_000, local=15_000, local_hits=6_000))
    assert [(item.state, item.close_reason) for item in closed] == [("closed", "recovered")]


def test_f23_is_a_warning_of_whatever_connector_it_is() -> None:
    found = feed(Scraped(), stream(60, asked=3_000, local=5_000, local_hits=1_600))
    assert kinds(found) == {("zero_hit", "warning", "guess")}
    assert found[0].opened_at - START >= 540


def test_f24_opens_and_closes_with_a_better_share() -> None:
    detector = Scraped()
    shape = {"stored": 2e8, "loaded": 3e6, "asked": 4_000, "local": 9_000, "local_hits": 3_000}
    found = feed(detector, stream(60, hits=80, **shape))
    assert kinds(found) == {("low_hits", "warning", "guess")}
    better = feed(detector, stream(60, 60, hits=2_000, **shape))
    assert [(item.state, item.close_reason) for item in better][-1] == ("closed", "recovered")


def test_f28_opens_on_a_server_without_any_connector() -> None:
    detector = Scraped()
    assert feed(detector, stream(40, usage=0.4, local=9_000, local_hits=7_000)) == []
    last = 39 * STEP
    stopped = (
        Scrape(target="node-a:8000", time=START + last + n * STEP, readings=read_page(page(
            local=(9_000 * (last + n * STEP), 7_000 * last), usage=0.4)))
        for n in range(1, 60)
    )  # fmt: skip
    assert kinds(feed(detector, stopped)) == {("local_hits_lost", "warning", "guess")}


def test_f30_opens_after_a_window_and_closes_when_the_tier_serves() -> None:
    detector = Scraped()
    shape = {"stored": 1e8, "asked": 3_500, "local": 7_000, "local_hits": 2_500, PROMOTIONS: 0.01}
    found = feed(detector, stream(60, **shape))
    assert kinds(found) == {("capacity_thrash", "warning", "certain")}
    assert found[0].cause == "capacity"
    served = feed(detector, stream(60, 60, hits=1_500, loaded=1e8, **shape))
    assert [(item.kind, item.state) for item in served] == [("capacity_thrash", "closed")]


@pytest.mark.parametrize(
    "rates",
    [
        {"asked": 5_000, "hits": 5_000, "local": 5_000},  # N11
        {"stored": 1e8, "loaded": 9e7, "asked": 700, "hits": 660, "local": 10_000,
         "local_hits": 9_280},  # N12
        {"stored": 1e8, "asked": 200, "local": 10_000, "local_hits": 9_800},  # N13
    ],
)  # fmt: skip
def test_healthy_servers_stay_silent(rates: dict[str, float]) -> None:
    assert feed(Scraped(), stream(200, usage=0.96, **rates)) == []
