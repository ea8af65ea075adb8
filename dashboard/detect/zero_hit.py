"""``zero_hit``: nothing is served any more, though it should be (design, section 7).

The newest run of eligible requests without a served token is an incident when
it is long enough, recent, and would be an accident of less than one in a
million at the rate at which this engine failed to serve before.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import Any, Final

import msgspec

from kvlens.dashboard.detect.base import Keyed
from kvlens.dashboard.detect.eligible import due, least_tokens
from kvlens.dashboard.detect.tally import Item, Subject, Tally, incident, item_of
from kvlens.dashboard.model.incident import ENGINE_GONE, RECOVERED, Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import IncidentKind, Severity

_LONGEST_RUN: Final = 4096
"""A run this long is an incident whatever the history, so that state stays bounded."""


class ZeroHitState(msgspec.Struct):
    """One incarnation."""

    engine_id: str
    model: str
    min_tokens: int = 0
    """Expected tokens from which a request is eligible."""
    eligible: float = 0.0
    """Requests before the run and outside incidents, weighted by 1 / sampling probability."""
    failed: float = 0.0
    """Those of them that were served nothing."""
    served_until: float = -math.inf
    newest: float = -math.inf
    run: list[Item] = []
    served_in_a_row: int = 0
    open: Tally | None = None
    opened_at: float = 0.0


class ZeroHit(Keyed[ZeroHitState]):
    """See :class:`kvlens.dashboard.detect.base.Detector`."""

    kind = IncidentKind.ZERO_HIT

    def __init__(self, thresholds: ThresholdsFor = defaults) -> None:
        super().__init__(ZeroHitState, thresholds)

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        thresholds = self._thresholds(engine.model)
        min_tokens = least_tokens(engine, thresholds)
        if not due(record, min_tokens):
            return None
        state = self._touch(record.incarnation_id)
        if state is None:
            state = self._states[record.incarnation_id] = ZeroHitState(
                engine.engine_id, engine.model
            )
        # Not kept from before a restart: the threshold may have been changed for it.
        state.min_tokens = min_tokens
        state.newest = max(state.newest, record.finish_time)
        if state.open is not None:
            return self._while_open(record, state, state.open, thresholds)
        if record.served_tokens:
            _served(record, state)
            return None
        return self._failed(record, engine, state, thresholds)

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Forget an incarnation that ended at ``at``; return its incident, now closed."""
        state = self._pop(incarnation_id)
        if state is None or state.open is None:
            return None
        return _incident(incarnation_id, state, state.open, (at, ENGINE_GONE))

    def is_open(self, incarnation_id: str) -> bool:
        """Whether an incident of this incarnation is open."""
        state = self._states.get(incarnation_id)
        return state is not None and state.open is not None

    def _failed(
        self, record: RequestRecord, engine: EngineInfo, state: ZeroHitState, thresholds: Thresholds
    ) -> Incident | None:
        if record.finish_time < state.served_until:  # arrived late
            state.eligible += 1
            state.failed += 1
            return None
        insort(state.run, item_of(record), key=lambda item: item.finish_time)
        oldest = state.newest - thresholds.zero_hit_window_seconds
        while state.run[0].finish_time < oldest or len(state.run) > _LONGEST_RUN:
            del state.run[0]
        if len(state.run) < _needed(state, thresholds):
            return None
        state.open = Tally(facts=_drafters(record, engine))
        state.opened_at = state.run[-1].finish_time
        for item in state.run:
            _count(state.open, item)
        state.run.clear()
        return _incident(record.incarnation_id, state, state.open)

    def _while_open(
        self, record: RequestRecord, state: ZeroHitState, tally: Tally, thresholds: Thresholds
    ) -> Incident | None:
        if not record.served_tokens:
            state.served_in_a_row = 0
            _count(tally, record)
            return _incident(record.incarnation_id, state, tally)
        state.served_in_a_row += 1
        state.served_until = max(state.served_until, record.finish_time)
        if state.served_in_a_row < thresholds.zero_hit_recovery:
            return None
        closed = _incident(record.incarnation_id, state, tally, (record.finish_time, RECOVERED))
        state.open, state.served_in_a_row = None, 0
        return closed


def _served(record: RequestRecord, state: ZeroHitState) -> None:
    """End the run; what finished before this request becomes history."""
    state.served_until = max(state.served_until, record.finish_time)
    state.eligible += 1 / record.sampling_probability
    before = [item for item in state.run if item.finish_time <= record.finish_time]
    state.eligible += len(before)
    state.failed += len(before)
    del state.run[: len(before)]


def _needed(state: ZeroHitState, thresholds: Thresholds) -> int:
    """Length from which a run is no accident: rate ** length < accident."""
    rate = state.failed / state.eligible if state.eligible else 0.0
    if rate <= 0:
        return thresholds.zero_hit_requests
    if rate >= 1:
        return _LONGEST_RUN
    length = math.floor(math.log(thresholds.zero_hit_accident) / math.log(rate)) + 1
    return min(max(length, thresholds.zero_hit_requests), _LONGEST_RUN)


def _count(tally: Tally, item: RequestRecord | Item) -> None:
    tally.add(item)
    tally.sum({"expected": item.expected_tokens, "servable": item.servable_tokens})


def _drafters(record: RequestRecord, engine: EngineInfo) -> dict[str, Any]:
    """Groups popped as drafter groups, and those that the model annotates as such."""
    groups = engine.layout.groups
    used = {group.kv_group for group in groups if group.drafter_used}
    used.update(g.kv_group for lookup in record.lookups for g in lookup.groups if g.drafter)
    return {
        "drafter_groups": sorted(used),
        "annotated_drafter_groups": [group.kv_group for group in groups if group.drafter],
    }


def _incident(
    incarnation_id: str, state: ZeroHitState, tally: Tally, closed: tuple[float, str] | None = None
) -> Incident:
    """Say what the run amounts to."""
    why = f"; cause: {tally.cause.replace('_', ' ')}" if tally.cause else ""
    expected = int(tally.numbers["expected"])
    return incident(
        IncidentKind.ZERO_HIT,
        Severity.CRITICAL,
        Subject(state.engine_id, incarnation_id, state.model),
        tally,
        state.opened_at,
        summary=f"{tally.requests:,} requests were served 0 of {expected:,} tokens that "
        f"offloading should have served{why}",
        evidence={
            "run_length": tally.requests,
            "expected_tokens": expected,
            "servable_tokens": int(tally.numbers["servable"]),
            "served_tokens": 0,
            "causes": tally.causes_named(),
            **tally.facts,
            "eligible_before": state.eligible,
            "served_nothing_before": state.failed,
        },
        scope={"min_expected_tokens": state.min_tokens, "max_served_tokens": 0},
        closed=closed,
    )
