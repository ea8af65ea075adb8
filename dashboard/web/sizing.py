"""How large the tier should be: share of reuses that a tier of a given size would serve.

A tier that evicts the least recently used chunk serves a reuse if fewer distinct chunks than
it holds were used since (Mattson et al., 1970). Records carry that distance for sampled
chunks (``telemetry/state/reuse.py``); the store keeps a histogram of it in powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.dashboard.model.totals import Totals
from kvlens.dashboard.view.format import compact

ENOUGH = 20
"""Requests with a reuse from which a curve means something."""


@dataclass(frozen=True)
class Sizing:
    """The curve, and what it says about the present size."""

    rows: tuple[tuple[int, float], ...]
    """``(chunks, share of the reuses served)``, ascending; shares 0 to 1."""
    line: str
    """SVG polyline in a box of 100 x 100, powers of two evenly spaced."""
    area: str
    capacity: int | None
    mark: str | None
    """Where the present capacity lies on the axis."""
    now: float | None
    """Share that the present capacity serves."""
    wanted: int | None
    """Smallest size that would serve 95 %."""
    requests: float
    evicted_tokens: float

    @property
    def advice(self) -> str:
        """One sentence."""
        if self.wanted is None or self.capacity is None or self.now is None:
            return "The engine did not tell how many chunks its tier holds."
        if self.now >= 0.95:
            return "The tier is large enough: nearly all that came back was still there."
        return (
            f"About {compact(self.wanted)} chunks, {self.wanted / self.capacity:.1f} times the "
            f"present size, would serve 95 % of what comes back."
        )


def sizing(totals: Totals, capacity: int | None) -> Sizing | None:
    """The curve from ``totals``; None without enough reuses."""
    buckets, requests = totals.reuse_buckets, sum(totals.reuse_buckets)
    if requests < ENOUGH:
        return None
    rows, seen = [], 0.0
    for power, number in enumerate(buckets):
        seen += number
        rows.append((2**power, seen / requests))
    last = max(len(rows) - 1, (capacity or 1).bit_length(), 1)
    rows += [(2**power, 1.0) for power in range(len(rows), last + 1)]
    points = [(100 * n / last, 100 - 100 * share) for n, (_, share) in enumerate(rows)]
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    # Of the bucket that the capacity lies in, only what surely fits counts.
    now = (
        None
        if capacity is None
        else max((share for chunks, share in rows if chunks <= capacity), default=0.0)
    )
    return Sizing(
        rows=tuple(rows),
        line=line,
        area=f"0,100 {line} 100,100",
        capacity=capacity,
        mark=f"{100 * min(_log2(capacity), last) / last:.2f}" if capacity else None,
        now=now,
        wanted=next(chunks for chunks, share in rows if share >= 0.95),
        requests=requests,
        evicted_tokens=totals.evicted_tokens,
    )


def _log2(capacity: int) -> float:
    """Position between powers of two, linear in between."""
    power = capacity.bit_length() - 1
    return float(power + (capacity - 2**power) / 2**power)
