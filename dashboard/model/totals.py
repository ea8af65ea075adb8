"""Sums over requests: what charts and totals are made of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from kvlens.telemetry.semconv import TRANSFER_BUCKETS


class GroupTotals(msgspec.Struct, kw_only=True):
    """Sums over requests of one KV-cache group, weighted like :class:`Totals`; chunks."""

    lookups: float = 0
    """Requests whose answer came after asking this group."""
    width: float = 0
    """Chunks asked for in those answers."""
    hits: float = 0
    """Chunks found, before the pop."""
    pops: float = 0
    vetoes: float = 0
    """Requests that this group brought to zero."""
    stored: float = 0
    loaded: float = 0
    held_back: float = 0
    refused: float = 0
    resident: float = 0
    """Chunks in the tier, summed over ``samples`` records."""
    samples: float = 0


class Totals(msgspec.Struct, kw_only=True):
    """Sums over requests, weighted by 1 / sampling probability; tokens, seconds."""

    requests: dict[str, float] = {}
    """By verdict."""
    expected_tokens: float = 0
    servable_tokens: float = 0
    served_tokens: float = 0
    lost_tokens: float = 0
    loads: float = 0
    reload_seconds: float = 0
    """Sum of reload latencies."""
    reload_buckets: list[float] = []
    """Loads per bucket of ``semconv.TRANSFER_BUCKETS``, not cumulative, last = beyond all."""
    lost_by_cause: dict[str, float] = {}
    """Lost tokens by cause."""
    evicted_tokens: float = 0
    """Tokens computed again because capacity had evicted their chunks."""
    lost_gpu_seconds: float = 0
    """Device time of computing lost and evicted tokens."""
    deferrals: float = 0
    """Requests whose lookup was deferred."""
    deferral_seconds: float = 0
    reuse_buckets: list[float] = []
    """Requests that used a chunk again, by the distinct chunks used in between: bucket ``n``
    holds distances below ``2 ** n`` chunks that no smaller bucket holds."""
    groups: dict[int, GroupTotals] = {}
    """By ``kv_group``."""


class Point(Totals, kw_only=True):
    """:class:`Totals` of the requests that finished in ``[time, time + step)``."""

    time: int


def quantile(buckets: list[float], q: float) -> float | None:
    """Reload latency in seconds below which a share ``q`` of the loads lies.

    Linear inside a bucket; None without loads; the last edge stands for all beyond.
    """
    total = sum(buckets)
    if not total:
        return None
    rank, seen = q * total, 0.0
    for index, count in enumerate(buckets[:-1]):
        if count and seen + count >= rank:
            low = TRANSFER_BUCKETS[index - 1] if index else 0.0
            return low + (TRANSFER_BUCKETS[index] - low) * (rank - seen) / count
        seen += count
    return TRANSFER_BUCKETS[-1]


_NUMBERS = tuple(
    name for name in Totals.__struct_fields__ if isinstance(getattr(Totals(), name), int)
)


def add_up(points: Iterable[Totals]) -> Totals:
    """The sum of ``points``."""
    total = Totals()
    for point in points:
        for name in _NUMBERS:
            setattr(total, name, getattr(total, name) + getattr(point, name))
        for into, more in (
            (total.requests, point.requests),
            (total.lost_by_cause, point.lost_by_cause),
        ):
            for key, value in more.items():
                into[key] = into.get(key, 0) + value
        total.reload_buckets = _lists(total.reload_buckets, point.reload_buckets)
        total.reuse_buckets = _lists(total.reuse_buckets, point.reuse_buckets)
        for number, group in point.groups.items():
            sums = total.groups.setdefault(number, GroupTotals())
            for name in GroupTotals.__struct_fields__:
                setattr(sums, name, getattr(sums, name) + getattr(group, name))
    return total


def _lists(one: list[float], other: list[float]) -> list[float]:
    return [before + more for before, more in zip_longest(one, other, fillvalue=0.0)]
