"""What one page says about each engine behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.dashboard.model.scrape import Reading
from kvlens.dashboard.scrape import foreign, names
from kvlens.dashboard.scrape.counting import TOTALS, counters, finite, is_number
from kvlens.dashboard.scrape.page import Page, Sample, parse, total
from kvlens.telemetry import semconv
from kvlens.telemetry.semconv import GroupKind

_OURS: Final = (
    semconv.INFO, semconv.CAPACITY_CHUNKS, semconv.RESIDENT_CHUNKS, semconv.LOOKUP_FALLBACK,
    semconv.LOST_TOKENS, semconv.REQUESTS, *TOTALS.values(),
)  # fmt: skip
_OUR_NAMES: Final = frozenset(metric.exposed_name for metric in _OURS)
WANTED: Final = _OUR_NAMES | frozenset(
    (
        names.STARTED, names.CREATED, names.CACHE_CONFIG, *names.GPU_USAGE, names.PROMPT_LENGTHS,
        *(f"{name}_bucket" for name in (*names.ASYNC_DELAYS, names.SYNC_DELAYS)),
        names.STORE_BYTES, names.LOAD_BYTES, names.DEPRECATED_BYTES, names.COMPUTED_LENGTHS,
        names.LOAD_SIZES, names.WAITING, names.BY_SOURCE, names.NIXL, names.NIXL_EXPIRED,
        *names.OFFLOADING, *foreign.NAMES,
        *(name for many in names.COUNTERS.values() for name in many),
    )
)  # fmt: skip
"""Names of all samples that :func:`read` looks at."""


def read_page(text: str) -> list[Reading]:
    """Readings of a page's text; raises ``PageError``."""
    return read(parse(text, WANTED))


def read(page: Page) -> list[Reading]:
    """One reading per engine and model, in their order; empty if the page is of none known.

    Several servers' pages may have been put together: each counts its engines from 0.
    """
    engines = sorted(_engines(page))
    readings = [_reading(_of(page, *who), *who) for who in engines]
    systems = foreign.systems(page)
    if not engines:
        return [_foreign(one, page) for one in systems]
    if len(readings) == 1:  # of several engines nothing says whose another connector's are
        for one in systems:
            _add(readings[0], one)
    return readings


def _foreign(one: foreign.Foreign, page: Page) -> Reading:
    """A page of another engine, or of a cache server: it is one engine, whatever its ranks."""
    return Reading(
        engine="0", model=one.model, started_at=_started(page), counters=one.counters,
        gpu_usage=one.usage, other=one.system, vllm=False,
    )  # fmt: skip


def _add(reading: Reading, one: foreign.Foreign) -> None:
    """What vLLM itself counts stays: a connector only tells what vLLM cannot."""
    reading.counters = {**one.counters, **reading.counters}
    reading.other = reading.other or one.system


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
        counters=dict(counters(page)),
        gpu_usage=_largest(sample for name in names.GPU_USAGE for sample in page.get(name, ())),
        gpu_tokens=_gpu_tokens(config.labels) if config else None,
        hash_algorithm=config.labels.get("prefix_caching_hash_algo", "") if config else "",
        prompt_lengths=finite(page, names.PROMPT_LENGTHS),
        computed_lengths=finite(page, names.COMPUTED_LENGTHS),
        load_sizes=finite(page, names.LOAD_SIZES),
        waiting={
            sample.labels.get(names.LABEL_REASON, ""): sample.value
            for sample in page.get(names.WAITING, ())
        },
        windows=_windows(config, info),
        offloading=any(name in page for name in names.OFFLOADING),
        pinned=[name for name in names.PINNED if name in page],
        deprecated=names.DEPRECATED_BYTES in page,
        transfers=names.NIXL in page or names.NIXL_EXPIRED in page,
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


def _windows(config: Sample | None, info: Sample | None) -> bool:
    """Whether vLLM's configuration or kvlens' layout names a sliding window."""
    size = config.labels.get("sliding_window", "") if config else ""
    layout = info.labels.get("layout", "") if info else ""
    return (is_number(size) and float(size) > 0) or str(GroupKind.SLIDING_WINDOW) in layout


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
    if is_number(size):
        return float(size)
    blocks, tokens = config.get("num_gpu_blocks", ""), config.get("block_size", "")
    return float(blocks) * float(tokens) if is_number(blocks) and is_number(tokens) else None
