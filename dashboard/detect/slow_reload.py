"""``slow_reload``: loads take twice as long as they used to on this engine and version.

The newest loads are held against all earlier ones. Their 95th percentile must
be over twice the earlier one, in seconds and (so that longer prompts are no
alarm) in seconds per chunk; and so many loads beyond that must be no accident.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from kvlens.dashboard.detect.base import Keyed
from kvlens.dashboard.detect.tally import Subject, Tally, incident
from kvlens.dashboard.model.incident import ENGINE_GONE, RECOVERED, Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, Load, RequestRecord
from kvlens.telemetry.semconv import IncidentKind, Severity

_RECENT: Final = 512
"""Recent loads kept, at most."""
_MEMORY: Final = 20_000
"""Earlier loads from which the older half fades."""
_QUANTILE: Final = 0.95
_STEP: Final = math.log(1.05)
"""Histogram buckets are 5 % wide."""


class Timing(msgspec.Struct, array_like=True):
    """One load."""

    time: float
    seconds: float
    per_chunk: float


class Histogram(msgspec.Struct):
    """Counts of positive values in buckets of equal ratio."""

    counts: dict[int, float] = {}
    total: float = 0.0
    p95: float = 0.0
    """95th percentile (upper edge of its bucket) as of the last 2 % more values; 0 when empty."""
    fresh: float = 0.0
    """Values since then."""

    def add(self, value: float) -> None:
        """Count one value."""
        bucket = math.ceil(math.log(max(value, 1e-9)) / _STEP)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += 1
        self.fresh += 1
        if self.total > _MEMORY:
            self.counts = {key: count / 2 for key, count in self.counts.items() if count >= 0.5}
            self.total = sum(self.counts.values())
        if self.fresh * 50 >= self.total:
            self.p95, self.fresh = self._quantile(_QUANTILE), 0.0

    def _quantile(self, share: float) -> float:
        left = share * self.total
        for bucket, count in sorted(self.counts.items()):
            left -= count
            if left <= 1e-9:
                return math.exp(bucket * _STEP)
        return 0.0

    def above(self, value: float) -> float:
        """How many lie in buckets beyond ``value``."""
        return sum(n for bucket, n in self.counts.items() if math.exp(bucket * _STEP) > value)


class ReloadState(msgspec.Struct):
    """One engine on one version, over all its incarnations."""

    seconds: Histogram = msgspec.field(default_factory=Histogram)
    per_chunk: Histogram = msgspec.field(default_factory=Histogram)
    recent: list[Timing] = []
    engine_id: str = ""
    incarnation_id: str = ""
    """Whose incident is open."""
    model: str = ""
    open: Tally | None = None
    opened_at: float = 0.0


class SlowReload(Keyed[ReloadState]):
    """See :class:`kvlens.dashboard.detect.base.Detector`."""

    kind = IncidentKind.SLOW_RELOAD

    def __init__(self, thresholds: ThresholdsFor = defaults) -> None:
        super().__init__(ReloadState, thresholds)

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        timings = [timing for load in record.loads if (timing := _timing(load)) is not None]
        if not timings:
            return None
        key = "\0".join(
            (engine.engine_id, engine.model, engine.vllm_version, engine.kvlens_version)
        )
        state = self._touch(key) or self._states.setdefault(key, ReloadState())
        thresholds = self._thresholds(engine.model)
        state.recent += timings
        self._age(state, thresholds)
        edge = thresholds.slow_reload_factor * state.seconds.p95
        if state.open is None and all(timing.seconds <= edge for timing in timings):
            return None  # it is no slow load that would open it
        slow, p95 = _slower(state, thresholds)
        if state.open is not None:
            if slow >= thresholds.slow_reload_factor:
                state.open.add(record)
                return _incident(state, state.open, slow, p95)
            if len(state.recent) >= thresholds.slow_reload_loads and slow < _between(thresholds):
                return self._close(state, record.finish_time, RECOVERED)
            return None
        if slow < thresholds.slow_reload_factor or not _no_accident(state, thresholds):
            return None
        state.engine_id, state.incarnation_id = engine.engine_id, record.incarnation_id
        state.model = engine.model
        state.open, state.opened_at = Tally(), record.finish_time
        state.open.add(record)
        state.open.sum({}, _facts(state))
        return _incident(state, state.open, slow, p95)

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Close the incident of an incarnation that ended; what is normal is remembered."""
        for key, state in self._states.items():
            if state.open is not None and state.incarnation_id == incarnation_id:
                self.dirty.add(key)
                return self._close(state, at, ENGINE_GONE)
        return None

    def _close(self, state: ReloadState, at: float, reason: str) -> Incident:
        assert state.open is not None
        closed = _incident(state, state.open, *_slower(state, None), closed=(at, reason))
        state.open = None
        state.recent.clear()
        return closed

    def _age(self, state: ReloadState, thresholds: Thresholds) -> None:
        """What is no longer recent is normal, unless it was part of an incident."""
        oldest = state.recent[-1].time - thresholds.slow_reload_window_seconds
        while len(state.recent) > thresholds.slow_reload_loads and (
            state.recent[0].time < oldest or len(state.recent) > _RECENT
        ):
            timing = state.recent.pop(0)
            if state.open is None:
                state.seconds.add(timing.seconds)
                state.per_chunk.add(timing.per_chunk)


def _timing(load: Load) -> Timing | None:
    """Synchronous loads include the step that waits for them: not comparable."""
    if load.latency is None or load.synchronous:
        return None
    chunks = sum(group.loaded for group in load.groups) or 1
    return Timing(load.time, load.latency, load.latency / chunks)


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, math.ceil(_QUANTILE * len(values)) - 1)]


def _slower(state: ReloadState, thresholds: Thresholds | None) -> tuple[float, float]:
    """How many times slower the recent loads are, and their 95th percentile in seconds."""
    if not state.recent:
        return 0.0, 0.0
    p95 = _p95([timing.seconds for timing in state.recent])
    least = 1 if thresholds is None else thresholds.slow_reload_loads
    if len(state.recent) < least or state.seconds.total < least:
        return 0.0, p95
    by_chunk = _p95([timing.per_chunk for timing in state.recent])
    return min(p95 / state.seconds.p95, by_chunk / state.per_chunk.p95), p95


def _between(thresholds: Thresholds) -> float:
    """Half the way back to normal."""
    return (1 + thresholds.slow_reload_factor) / 2


def _no_accident(state: ReloadState, thresholds: Thresholds) -> bool:
    """Whether so many slow loads are improbable at the rate at which they came before."""
    edge = thresholds.slow_reload_factor * state.seconds.p95
    rate = (state.seconds.above(edge) + 1) / (state.seconds.total + 1)
    number = len(state.recent)
    slow = sum(timing.seconds > edge for timing in state.recent)
    tail = sum(
        math.comb(number, k) * rate**k * (1 - rate) ** (number - k) for k in range(slow, number + 1)
    )
    return tail < thresholds.slow_reload_accident


def _facts(state: ReloadState) -> dict[str, float | int]:
    return {
        "baseline_p95_seconds": round(state.seconds.p95, 6),
        "baseline_loads": int(state.seconds.total),
    }


def _incident(
    state: ReloadState,
    tally: Tally,
    slower: float,
    p95: float,
    closed: tuple[float, str] | None = None,
) -> Incident:
    normal = tally.facts["baseline_p95_seconds"]
    return incident(
        IncidentKind.SLOW_RELOAD,
        Severity.WARNING,
        Subject(state.engine_id, state.incarnation_id, state.model),
        tally,
        state.opened_at,
        summary=f"95 % of reloads took up to {p95:.3g} s, {slower:.1f} times as long as before "
        f"on this engine and version ({normal:.3g} s)",
        evidence={"p95_seconds": round(p95, 6), "loads": len(state.recent), **tally.facts},
        next_step="Compare transfer time with latency in the request pages: if transfers are "
        "slower, look for other load on the host's memory, PCIe or the tier's disk or network; "
        "if only latency is, the scheduler is late: look at step times and at CPU starvation.",
        closed=closed,
    )
