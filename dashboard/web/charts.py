"""Bars over time from a store's series: percentages for SVG attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlens.dashboard.model.totals import Point
from kvlens.dashboard.view.format import compact, utc

RANGES = {"1h": 3600, "6h": 21600, "24h": 86400, "7d": 604800}
"""Time ranges that a page offers, seconds."""
DEFAULT_RANGE = "24h"
BARS = 96


@dataclass(frozen=True)
class TimeRange:
    """A range of time that a page shows; Unix seconds."""

    name: str
    since: float
    until: float
    step: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since

    @classmethod
    def named(cls, name: str, now: float) -> TimeRange:
        """The range called ``name``, ending now; an unknown name is the default."""
        name = name if name in RANGES else DEFAULT_RANGE
        seconds = RANGES[name]
        step = max(-(-seconds // BARS // 60) * 60, 60)
        until = (int(now) // step + 1) * step
        return cls(name, until - seconds, until, step)


@dataclass(frozen=True)
class Bar:
    """One step of time: served below, lost on top; heights in percent."""

    x: str
    width: str
    served_y: str
    served_height: str
    lost_y: str
    lost_height: str
    title: str


@dataclass(frozen=True)
class Chart:
    """Served and lost tokens over time."""

    bars: tuple[Bar, ...]
    top: float
    """Tokens per step at the upper edge."""
    window: TimeRange


def token_chart(points: Sequence[Point], window: TimeRange) -> Chart | None:
    """Lay out ``points``; None when no step has served or lost tokens."""
    top = max((point.served_tokens + point.lost_tokens for point in points), default=0)
    if not top:
        return None
    span = window.until - window.since
    bars = []
    for point in points:
        served, lost = 100 * point.served_tokens / top, 100 * point.lost_tokens / top
        bars.append(
            Bar(
                x=f"{100 * (point.time - window.since) / span:.3f}%",
                width=f"{max(100 * window.step / span - 0.18, 0.2):.3f}%",
                served_y=f"{100 - served:.2f}%",
                served_height=f"{served:.2f}%",
                lost_y=f"{100 - served - lost:.2f}%",
                lost_height=f"{lost:.2f}%",
                title=f"{utc(point.time)}: {compact(point.served_tokens)} tokens served, "
                f"{compact(point.lost_tokens)} lost, "
                f"{compact(sum(point.requests.values()))} requests",
            )
        )
    return Chart(tuple(bars), top, window)
