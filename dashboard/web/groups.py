"""KV-cache groups of an engine over a range of time: what each was asked, held and gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlens.dashboard.model.totals import GroupTotals, Point
from kvlens.dashboard.view.format import compact, utc
from kvlens.dashboard.web.bars import percent
from kvlens.dashboard.web.charts import TimeRange
from kvlens.telemetry.records import EngineInfo, GroupLayout

HEIGHT = 34
"""Of a small chart, in its own units."""


@dataclass(frozen=True)
class Spark:
    """A small line over the window. ``points`` is an SVG polyline in a box of 100 x HEIGHT."""

    segments: tuple[str, ...]
    """Polylines; time without requests is a gap, not a zero."""
    top: float
    label: str
    title: str


@dataclass(frozen=True)
class GroupRow:
    """One group: sums over the window, and lines."""

    layout: GroupLayout
    sums: GroupTotals
    resident: float | None
    """Chunks in the tier, mean of the newest step."""
    resident_share: str | None
    """Of the tier's capacity, as a width for SVG."""
    sparks: tuple[Spark, ...]


def group_rows(
    info: EngineInfo, points: Sequence[Point], total: dict[int, GroupTotals], window: TimeRange
) -> list[GroupRow]:
    """One row per group, in group order; empty if no record told of groups."""
    if not total:
        return []
    # Lines begin with the first request: an hour of a day would be a dot.
    begin = max(window.since, points[0].time)
    rows = []
    for layout in info.layout.groups:
        number = layout.kv_group
        series = [(point.time, point.groups.get(number, GroupTotals())) for point in points]
        levels = [(at, sums.resident / sums.samples) for at, sums in series if sums.samples]
        resident = levels[-1][1] if levels else None
        share = None
        if resident is not None and info.capacity_chunks:
            share = percent(min(resident, info.capacity_chunks), info.capacity_chunks)
        rows.append(
            GroupRow(
                layout=layout,
                sums=total.get(number, GroupTotals()),
                resident=resident,
                resident_share=share,
                sparks=(
                    _spark(
                        "asked per lookup",
                        begin,
                        window,
                        [(at, s.width / s.lookups) for at, s in series if s.lookups],
                    ),
                    _spark(
                        "found per lookup",
                        begin,
                        window,
                        [(at, s.hits / s.lookups) for at, s in series if s.lookups],
                    ),
                    _spark(
                        "stored",
                        begin,
                        window,
                        [(at, s.stored) for at, s in series if s.samples or s.stored],
                    ),
                    _spark(
                        "loaded",
                        begin,
                        window,
                        [(at, s.loaded) for at, s in series if s.samples or s.loaded],
                    ),
                    _spark("resident", begin, window, levels),
                ),
            )
        )
    return rows


def _spark(
    name: str, begin: float, window: TimeRange, values: Sequence[tuple[int, float]]
) -> Spark:
    top = max((value for _, value in values), default=0.0)
    span = window.until - begin
    segments: list[list[str]] = []
    last = None
    for at, value in values:
        if last is None or at - last > window.step:
            segments.append([])
        x = 100 * (at + window.step / 2 - begin) / span
        y = HEIGHT - 2 - (HEIGHT - 4) * (value / top if top else 0.0)
        segments[-1].append(f"{x:.2f},{y:.1f}")
        last = at
    # A step alone is a dot: a line of no length with round ends.
    lines = [pair if len(pair) > 1 else pair * 2 for pair in segments]
    newest = f"{compact(values[-1][1])} at {utc(values[-1][0])}" if values else "no data"
    return Spark(
        tuple(" ".join(line) for line in lines),
        top,
        name,
        f"{name}: highest {compact(top)} chunks, newest {newest}",
    )
