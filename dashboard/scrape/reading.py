"""What one page says about each engine behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.dashboard.model.scrape import LOST, VERDICT, Reading
from kvlens.dashboard.scrape import names
from kvlens.dashboard.scrape.page import Page, Sample, parse, total
from kvlens.telemetry import semconv
from kvlens.telemetry.semconv import Metric

_TOTALS: Final[dict[str, Metric]] = {
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
_OURS: Final = (
    semconv.INFO, semconv.CAPACITY_CHUNKS, semconv.RESIDENT_CHUNKS, semconv.LOOKUP_FALLBACK,
    semconv.LOST_TOKENS, semconv.REQUESTS, *_TOTALS.values(),
)  # fmt: skip
_OUR_NAMES: Final = frozenset(metric.exposed_name for metric in _OURS)
WANTED: Final = _OUR_NAMES | frozenset(
    (
        names.STARTED, names.CREATED, names.CACHE_CONFIG, *names.GPU_USAGE, names.PROMPT_LENGTHS,
        f"{names.ASYNC_DELAYS}_bucket", names.STORE_BYTES, names.LOAD_BYTES,
        names.DEPRECATED_BYTES, *(name for many in names.COUNTERS.values() for name in many),
    )
)  # fmt: skip
"""Names of all samples that :func:`read` looks at."""


def read_page(text: str) -> list[Reading]:
    """Readings of a page's text; raises ``PageError``."""
    return read(parse(text, WANTED))


def read(page: Page) -> list[Reading]:
    """One reading per engine and model, in their order; empty if the page is not vLLM's.

    Several servers' pages may have been put together: each counts its engines from 0.
    """
    return [_reading(_of(page, *who), *who) for who in sorted(_engines(page))]


def _engines(page: Page) -> set[tuple[str, str]]:
    """``(engine, model)`` of all; what is not labelled with either is nobody's own."""
    told = {
        (sample.labels.get(names.LABEL_ENGINE), sample.labels.get(names.LABEL_MODEL))
        for name, samples in page.items()
        if name in _OUR_NAMES or (name.startswith(names.PREFIX) and name != names.CACHE_CONFIG)
        for sample in samples
    }
    found: set[tuple[str, str]] = set()
    # Those with the most labels first: what lacks one is counted to them where it fits.
    for engine, model in sorted(told, key=lambda who: who.count(None)):
        if not any(engine in (None, e) and model in (None, m) for e, m in found):
            found.add(("0" if engine is None else engine, model or ""))
    return found


def _of(page: Page, engine: str, model: str) -> Page:
    """Samples of one engine, and those that are the whole process's."""
    own = {names.LABEL_ENGINE: engine, names.LABEL_MODEL: model}
    return {
        name: kept
        for name, samples in page.items()
        if (
            kept := [
                sample
                for sample in samples
                if all(sample.labels.get(key, value) == value for key, value in own.items())
            ]
        )
    }


def _reading(page: Page, engine: str, model: str) -> Reading:
    config = _first(page, names.CACHE_CONFIG)
    info = _first(page, semconv.INFO.exposed_name)
    own = {names.LABEL_ENGINE, names.LABEL_MODEL}
    return Reading(
        engine=engine,
        model=model,
        started_at=_started(page),
        counters=dict(_counters(page)),
        gpu_usage=_largest(sample for name in names.GPU_USAGE for sample in page.get(name, ())),
        gpu_tokens=_gpu_tokens(config.labels) if config else None,
        hash_algorithm=config.labels.get("prefix_caching_hash_algo", "") if config else "",
        prompt_lengths={
            float(edge): count
            for edge, count in _buckets(page, names.PROMPT_LENGTHS).items()
            if _is_number(edge)
        },
        info={k: v for k, v in info.labels.items() if k not in own} if info else {},
        capacity_chunks=total(page, [semconv.CAPACITY_CHUNKS.exposed_name]),
        resident_chunks={
            sample.labels.get(semconv.LABEL_GROUP, ""): sample.value
            for sample in page.get(semconv.RESIDENT_CHUNKS.exposed_name, ())
        },
        fallback=bool(
            total(
                page,
                [semconv.LOOKUP_FALLBACK.exposed_name],
                **{semconv.LABEL_REASON: str(semconv.Fallback.INVARIANT)},
            )
        ),
    )


def _counters(page: Page) -> Iterable[tuple[str, float]]:
    for key, series in names.COUNTERS.items():
        if (value := total(page, series)) is not None:
            yield key, value
    yield from _bytes(page)
    for key, metric in _TOTALS.items():
        if (value := total(page, [metric.exposed_name])) is not None:
            yield key, value
    for prefix, metric, label in _BY_LABEL:
        for sample in page.get(metric.exposed_name, ()):
            yield prefix + sample.labels.get(label, ""), sample.value
    buckets = _buckets(page, f"{names.ASYNC_DELAYS}_bucket")
    finite = [float(edge) for edge in buckets if _is_number(edge)]
    if "+Inf" in buckets and max(finite, default=0.0) >= names.LONGEST_DELAY:
        longest = max((edge for edge in buckets if _is_number(edge)), key=float)
        yield "delays_beyond", buckets["+Inf"] - buckets[longest]


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


def _started(page: Page) -> float | None:
    """Start of the server; of several processes on one page, the newest."""
    for name in (names.STARTED, names.CREATED):
        if (newest := _largest(page.get(name, ()))) is not None:
            return newest
    return None


def _first(page: Page, name: str) -> Sample | None:
    return next(iter(page.get(name, ())), None)


def _largest(samples: Iterable[Sample]) -> float | None:
    return max((sample.value for sample in samples), default=None)


def _gpu_tokens(config: object) -> float | None:
    """Size of the GPU cache in tokens, as vLLM gives it, else blocks times their size."""
    assert isinstance(config, dict)
    size = config.get("kv_cache_size_tokens", "")
    if _is_number(size):
        return float(size)
    blocks, tokens = config.get("num_gpu_blocks", ""), config.get("block_size", "")
    return float(blocks) * float(tokens) if _is_number(blocks) and _is_number(tokens) else None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e+", "", 1).isdecimal()
