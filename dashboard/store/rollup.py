"""Sums that charts and totals are made of, as ``key -> value`` counters.

Keys, not columns: a new chart adds keys and needs no migration. All counters of one
engine and slot of time are kept together, so that a day is 1,440 rows and not 30,000.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from kvlens.dashboard.model.totals import GroupTotals, Point, Totals
from kvlens.telemetry.records import GroupLookup, RequestRecord
from kvlens.telemetry.semconv import TRANSFER_BUCKETS

_REQUESTS: Final = "requests."
_RELOAD: Final = "reload."
_BUCKETS: Final = len(TRANSFER_BUCKETS) + 1
_REUSE_BUCKETS: Final = 64
_CAUSE: Final = "cause."
_REUSE: Final = "reuse."
_GROUP: Final = "group."
_TOKENS: Final = (
    "expected_tokens",
    "servable_tokens",
    "served_tokens",
    "lost_tokens",
    "evicted_tokens",
    "lost_gpu_seconds",
)
_SCALARS: Final = (*_TOKENS, "loads", "reload_seconds", "deferrals", "deferral_seconds")
MINUTE: Final = 60
HOUR: Final = 3600
EVER: Final = 0
"""The one slot of an engine's whole life."""
LEVELS: Final = (HOUR, MINUTE)
"""Lengths of the slots that are kept, seconds; each is a multiple of those after it."""
TotalsT = TypeVar("TotalsT", bound=Totals)
Counters = dict[str, float]
_decoder = msgspec.json.Decoder(dict[str, int | float])


def level_of(step: int) -> int:
    """Coarsest slots that steps of ``step`` seconds can be summed from."""
    return next(level for level in LEVELS if step % level == 0)


def add(counters: Counters, more: Iterable[tuple[str, float]]) -> Counters:
    """Add to ``counters`` and return it."""
    for key, value in more:
        counters[key] = counters.get(key, 0) + value
    return counters


def of_fleet(counters: Counters) -> Counters:
    """Without what is of single groups: group 0 of one model is not group 0 of another."""
    return {key: value for key, value in counters.items() if not key.startswith(_GROUP)}


def pack(counters: Counters) -> str:
    """As kept in the store."""
    return msgspec.json.encode(counters).decode()


def unpack(text: str) -> Counters:
    """Give back what :func:`pack` took."""
    return _decoder.decode(text)


def points(slots: Iterable[tuple[int, Counters]], step: int) -> list[Point]:
    """Sum ``(time, counters)`` per ``step`` seconds, oldest first; takes the counters over."""
    sums: dict[int, Counters] = {}
    for time, found in slots:
        start = time // step * step
        if start in sums:
            add(sums[start], found.items())
        else:
            sums[start] = found
    return [fill(Point(time=time), sums[time].items()) for time in sorted(sums)]


def counters(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """Return what one request adds, weighted so that sampled requests stand for all.

    Whole numbers stay integers: only sampling makes fractions.
    """
    probability = record.sampling_probability
    weight = 1 if probability == 1 else 1 / probability
    yield _REQUESTS + record.verdict, weight
    for name in _TOKENS:
        if value := getattr(record, name):
            yield name, value * weight
    if record.lost_tokens and record.cause:
        yield _CAUSE + record.cause, record.lost_tokens * weight
    if record.deferral_seconds:
        yield "deferrals", weight
        yield "deferral_seconds", record.deferral_seconds * weight
    if record.reuse_distance is not None:
        yield f"{_REUSE}{record.reuse_distance.bit_length()}", weight
    for group, name, value in _of_groups(record):
        yield f"{_GROUP}{group}.{name}", value * weight
    for load in record.loads:
        if load.latency is not None:
            yield "loads", weight
            yield "reload_seconds", load.latency * weight
            yield f"{_RELOAD}{bisect_left(TRANSFER_BUCKETS, load.latency)}", weight


def _of_groups(record: RequestRecord) -> Iterator[tuple[int, str, int]]:
    """``(kv_group, name of GroupTotals, value)``: the answered lookup, stores and loads."""
    if record.lookups and record.lookups[-1].result is not None:
        asked: dict[int, GroupLookup] = {}
        for query in record.lookups[-1].groups:
            if query.pass_number:
                asked[query.kv_group] = query  # the last pass is the one that counts
        for group, query in asked.items():
            yield group, "lookups", 1
            yield group, "width", query.width
            if query.raw_hits:
                yield group, "hits", query.raw_hits
            if query.popped:
                yield group, "pops", query.popped
    for group, resident in record.resident_chunks.items():
        yield group, "resident", resident
        yield group, "samples", 1
    if record.vetoing_group is not None:
        yield record.vetoing_group, "vetoes", 1
    for store in record.stores:
        for chunks in store.groups:
            if chunks.stored and not store.failed:
                yield chunks.kv_group, "stored", chunks.stored
            if chunks.held_back:
                yield chunks.kv_group, "held_back", chunks.held_back
            if chunks.refused:
                yield chunks.kv_group, "refused", chunks.refused
    for load in record.loads:
        for chunks in load.groups:
            if chunks.loaded and not load.failed:
                yield chunks.kv_group, "loaded", chunks.loaded


def fill(totals: TotalsT, pairs: Iterable[tuple[str, float]]) -> TotalsT:
    """Put counters into ``totals`` and return it."""
    buckets: list[float] = [0] * _BUCKETS
    totals.reload_buckets = buckets
    reuse: list[float] = []
    for key, value in pairs:
        kind, name, index = _meaning(key)
        if kind == _REQUESTS:
            totals.requests[name] = value
        elif kind == _CAUSE:
            totals.lost_by_cause[name] = value
        elif kind == _RELOAD:
            buckets[index] = value
        elif kind == _REUSE:
            reuse.extend([0] * (index + 1 - len(reuse)))
            reuse[index] = value
        elif kind == _GROUP:
            group = totals.groups.get(index)
            if group is None:
                group = totals.groups[index] = GroupTotals()
            setattr(group, name, value)
        elif kind:
            setattr(totals, name, value)
    totals.reuse_buckets = reuse
    return totals


@lru_cache(maxsize=8192)
def _meaning(key: str) -> tuple[str, str, int]:
    """``(kind, name, index)`` of a key; no kind for one of a newer version."""
    kind, _, rest = key.partition(".")
    kind += "."
    if kind in (_REQUESTS, _CAUSE):
        return kind, rest, 0
    if kind in (_RELOAD, _REUSE) and rest.isdecimal():
        index = int(rest)
        return kind if index < (_BUCKETS if kind == _RELOAD else _REUSE_BUCKETS) else "", "", index
    if kind == _GROUP:
        group, _, name = rest.partition(".")
        known = group.isdecimal() and name in GroupTotals.__struct_fields__
        return (kind, name, int(group)) if known else ("", key, 0)
    return (key if key in _SCALARS else "", key, 0)
