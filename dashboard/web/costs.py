"""What losses cost: tokens and device time computed again, by cause and by engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.totals import Totals, add_up
from kvlens.dashboard.store.base import Store
from kvlens.dashboard.web.bars import percent
from kvlens.dashboard.web.charts import TimeRange

MOST_ENGINES = 20
"""Rows of the table: the engines that lost most since their start."""
_HOUR = 3600


@dataclass(frozen=True)
class CauseRow:
    """Tokens lost to one cause; ``width`` is its share of the largest, for SVG."""

    cause: str
    tokens: float
    width: str


@dataclass(frozen=True)
class EngineRow:
    """One engine in the window."""

    engine: Engine
    totals: Totals


@dataclass(frozen=True)
class CostPage:
    """The fleet over a window of time."""

    window: TimeRange
    totals: Totals
    causes: list[CauseRow]
    engines: list[EngineRow]
    left_out: int

    @property
    def again(self) -> float:
        """Tokens that were computed again: lost, or evicted before they came back."""
        return self.totals.lost_tokens + self.totals.evicted_tokens

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.window.seconds

    @property
    def devices(self) -> str:
        """Devices that do nothing but compute again, on average."""
        busy = self.totals.lost_gpu_seconds / self.seconds
        return "< 0.01" if 0 < busy < 0.01 else f"{busy:,.2f}"


def cost_page(store: Store, window: TimeRange) -> CostPage:
    """Read the page."""
    if window.seconds > _HOUR:  # whole hours: their sums are kept, a hundredth of the rows
        since = window.since // _HOUR * _HOUR
        window = replace(window, since=since, step=_HOUR)
    totals = add_up(store.series(window.since, window.until, window.step, None))
    active = [engine for engine in store.engines() if engine.last_seen >= window.since]
    active.sort(key=lambda item: -(item.totals.lost_tokens + item.totals.evicted_tokens))
    rows = [
        EngineRow(
            engine,
            add_up(
                store.series(window.since, window.until, window.step, engine.info.incarnation_id)
            ),
        )
        for engine in active[:MOST_ENGINES]
    ]
    rows.sort(key=lambda row: -(row.totals.lost_tokens + row.totals.evicted_tokens))
    top = max(totals.lost_by_cause.values(), default=0.0)
    return CostPage(
        window=window,
        totals=totals,
        causes=[
            CauseRow(cause, tokens, percent(tokens, top))
            for cause, tokens in sorted(totals.lost_by_cause.items(), key=lambda item: -item[1])
        ],
        engines=rows,
        left_out=max(0, len(active) - MOST_ENGINES),
    )
