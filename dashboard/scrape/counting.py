"""Counters and histograms of one engine, as numbers by what they count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.dashboard.model.scrape import LOST, SOURCE, VERDICT
from kvlens.dashboard.scrape import names
from kvlens.dashboard.scrape.page import Page, total
from kvlens.telemetry import semconv
from kvlens.telemetry.semconv import Metric

TOTALS: Final[dict[str, Metric]] = {
    "expected_tokens": semconv.EXPECTED_TOKENS,
    "servable_tokens": semconv.SERVABLE_TOKENS,
    "served_tokens": semconv.SERVED_TOKENS,
    "evicted_tokens": semconv.EVICTED_TOKENS,
    "stored_chunks": semconv.STORED_CHUNKS,
    "refused_chunks": semconv.REFUSED_CHUNKS,
    "observer_errors": semconv.OBSERVER_ERRORS,
    "dropped_facts": semconv.DROPPED_FACTS,
    "dropped_spans": semconv.DROPPED_SPANS,
}
_BY_LABEL: Final = (
    (LOST, semconv.LOST_TOKENS, semconv.LABEL_CAUSE),
    (VERDICT, semconv.REQUESTS, semconv.LABEL_VERDICT),
)


def counters(page: Page) -> Iterable[tuple[str, float]]:
    """Every counter of one engine, by what it counts."""
    for key, series in names.COUNTERS.items():
        if (value := total(page, series)) is not None:
            yield key, value
    yield from _bytes(page)
    for key, metric in TOTALS.items():
        if (value := total(page, [metric.exposed_name])) is not None:
            yield key, value
    for prefix, metric, label in _BY_LABEL:
        for sample in page.get(metric.exposed_name, ()):
            yield prefix + sample.labels.get(label, ""), sample.value
    beyond = [_beyond(page, f"{name}_bucket", names.LONGEST_DELAY) for name in names.ASYNC_DELAYS]
    if told := [count for count in beyond if count is not None]:
        yield "delays_beyond", max(told)
    if (blocked := _beyond(page, f"{names.SYNC_DELAYS}_bucket", names.LONGEST_LOOKUP)) is not None:
        yield "lookups_beyond", blocked
    for sample in page.get(names.BY_SOURCE, ()):
        yield SOURCE + sample.labels.get(names.LABEL_SOURCE, ""), sample.value


def _beyond(page: Page, name: str, longest: float) -> float | None:
    """Observations above the last finite edge, if that is ``longest`` seconds or more."""
    buckets = _buckets(page, name)
    last = max((edge for edge in buckets if is_number(edge)), key=float, default="0")
    if "+Inf" not in buckets or float(last) < longest:
        return None
    return buckets["+Inf"] - buckets[last]


def finite(page: Page, name: str) -> dict[float, float]:
    """Counts by upper edge, without the last one."""
    counts = _buckets(page, name)
    return {float(edge): count for edge, count in counts.items() if is_number(edge)}


def _buckets(page: Page, name: str) -> dict[str, float]:
    """Counts by upper edge, as written; all children of one engine are summed."""
    counts: dict[str, float] = {}
    for sample in page.get(name, ()):
        edge = sample.labels.get(names.LABEL_LE, "")
        counts[edge] = counts.get(edge, 0.0) + sample.value
    return counts


def _bytes(page: Page) -> Iterable[tuple[str, float]]:
    """Bytes each way. The deprecated counters count the same bytes: the larger one is right,
    since either may be missing, or stay at 0 beside a spec of one's own."""
    for key, name, transfer in (
        ("store_bytes", names.STORE_BYTES, names.STORE_TRANSFER),
        ("load_bytes", names.LOAD_BYTES, names.LOAD_TRANSFER),
    ):
        flat = total(page, [name])
        old = total(page, [names.DEPRECATED_BYTES], **{names.LABEL_TRANSFER: transfer})
        found = [value for value in (flat, old) if value is not None]
        if found:
            yield key, max(found)


def is_number(text: str) -> bool:
    """Whether a label's value is a finite number."""
    return text.replace(".", "", 1).replace("e+", "", 1).isdecimal()
