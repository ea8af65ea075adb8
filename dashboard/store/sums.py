"""Adding up totals, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from kvlens.dashboard.store.base import GroupTotals, Totals

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
