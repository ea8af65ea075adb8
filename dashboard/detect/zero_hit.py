"""``zero_hit``: nothing is served any more, though it should be (design, section 7).

The newest run of eligible requests without a served token is an incident when
it is long enough, recent, and would be an accident of less than one in a
million at the rate at which this engine failed to serve before.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from typing import Final

import msgspec

from kvlens.dashboard.detect.base import ENGINE_GONE, RECOVERED, Incident
from kvlens.dashboard.detect.run import Run, State, add, drafter_groups, incident_of, item_of
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Exit, IncidentKind, Verdict

_NOTHING_DUE: Final = frozenset(
    map(str, (Verdict.SKIPPED, Verdict.LOCAL, Verdict.COLD, Verdict.EVICTED))
)
"""Verdicts that say that nothing was there to be served."""
_NOT_OURS: Final = frozenset(map(str, (Exit.OTHER_CONNECTOR, Exit.NOT_ADMITTED, Exit.SKIPPED)))
"""Ends of a last lookup after which serving nothing says nothing about the tier."""
_LONGEST_RUN: Final = 4096
"""A run this long is an incident whatever the history, so that state stays bounded."""


@dataclass(frozen=True)
class ZeroHitConfig:
    """Thresholds; tokens, seconds, a probability, requests."""

    min_tokens: int = 256
    min_requests: int = 3
    window: float = 1800.0
    accident: float = 1e-6
    recovery: int = 10


class ZeroHit:
    """See :class:`kvlens.dashboard.detect.base.Detector`."""

    kind: Final = IncidentKind.ZERO_HIT

    def __init__(self, config: ZeroHitConfig | None = None) -> None:
        self._config = config or ZeroHitConfig()
        self._states: dict[str, State] = {}

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        state = self._states.get(record.incarnation_id)
        if state is None:
            state = self._states[record.incarnation_id] = State(
                engine_id=engine.engine_id,
                model=engine.model,
            )
        # Not kept from before a restart: the threshold may have been changed for it.
        state.min_tokens = max(engine.layout.largest_chunk, self._config.min_tokens)
        if not _eligible(record, state.min_tokens):
            return None
        state.newest = max(state.newest, record.finish_time)
        if state.open is not None:
            return self._while_open(record, state, state.open)
        if record.served_tokens:
            self._served(record, state)
            return None
        return self._failed(record, engine, state)

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Forget an incarnation that ended at ``at``; return its incident, now closed."""
        state = self._states.pop(incarnation_id, None)
        if state is None or state.open is None:
            return None
        return incident_of(incarnation_id, state, state.open, at, ENGINE_GONE)

    def dump(self, incarnation_id: str) -> bytes | None:
        """State of one incarnation, to survive a restart; None when there is none."""
        state = self._states.get(incarnation_id)
        return None if state is None else msgspec.msgpack.encode(state)

    def load(self, incarnation_id: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""
        self._states[incarnation_id] = msgspec.msgpack.decode(state, type=State)

    def _served(self, record: RequestRecord, state: State) -> None:
        """End the run; what finished before this request becomes history."""
        state.served_until = max(state.served_until, record.finish_time)
        state.eligible += 1 / record.sampling_probability
        before = [item for item in state.run if item.finish_time <= record.finish_time]
        state.eligible += len(before)
        state.failed += len(before)
        del state.run[: len(before)]

    def _failed(self, record: RequestRecord, engine: EngineInfo, state: State) -> Incident | None:
        if record.finish_time < state.served_until:  # arrived late
            state.eligible += 1
            state.failed += 1
            return None
        insort(state.run, item_of(record), key=lambda item: item.finish_time)
        oldest = state.newest - self._config.window
        while state.run[0].finish_time < oldest or len(state.run) > _LONGEST_RUN:
            del state.run[0]
        if len(state.run) < self._needed(state):
            return None
        used, annotated = drafter_groups(record, engine)
        state.open = Run(
            opened_at=state.run[-1].finish_time,
            first=state.run[0].request_id,
            since=state.run[0].finish_time,
            until=state.run[0].finish_time,
            drafter_groups=used,
            annotated_drafter_groups=annotated,
        )
        for item in state.run:
            add(state.open, item)
        state.run.clear()
        return incident_of(record.incarnation_id, state, state.open)

    def _while_open(self, record: RequestRecord, state: State, run: Run) -> Incident | None:
        if not record.served_tokens:
            state.served_in_a_row = 0
            add(run, item_of(record))
            return incident_of(record.incarnation_id, state, run)
        state.served_in_a_row += 1
        state.served_until = max(state.served_until, record.finish_time)
        if state.served_in_a_row < self._config.recovery:
            return None
        closed = incident_of(record.incarnation_id, state, run, record.finish_time, RECOVERED)
        state.open, state.served_in_a_row = None, 0
        return closed

    def _needed(self, state: State) -> int:
        """Length from which a run is no accident: rate ** length < accident."""
        rate = state.failed / state.eligible if state.eligible else 0.0
        if rate <= 0:
            return self._config.min_requests
        if rate >= 1:
            return _LONGEST_RUN
        length = math.floor(math.log(self._config.accident) / math.log(rate)) + 1
        return min(max(length, self._config.min_requests), _LONGEST_RUN)


def _eligible(record: RequestRecord, min_tokens: int) -> bool:
    if record.expected_tokens < min_tokens or record.verdict in _NOTHING_DUE:
        return False
    return not record.lookups or record.lookups[-1].exit not in _NOT_OURS
