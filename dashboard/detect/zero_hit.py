"""``zero_hit``: nothing is served any more, though it should be (design, section 7).

The newest run of eligible requests without a served token is an incident when
it is long enough, recent, and would be an accident of less than one in a
million at the rate at which this engine failed to serve before.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvlens.dashboard.detect.base import (
    CLOSED,
    ENGINE_GONE,
    OPEN,
    RECOVERED,
    Incident,
    Scope,
    incident_id,
)
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Confidence, Exit, IncidentKind, Severity, Verdict

_NOTHING_DUE: Final = frozenset(
    map(str, (Verdict.SKIPPED, Verdict.LOCAL, Verdict.COLD, Verdict.EVICTED))
)
"""Verdicts that say that nothing was there to be served."""
_NOT_OURS: Final = frozenset(map(str, (Exit.OTHER_CONNECTOR, Exit.NOT_ADMITTED, Exit.SKIPPED)))
"""Ends of a last lookup after which serving nothing says nothing about the tier."""
_LONGEST_RUN: Final = 4096
"""A run this long is an incident whatever the history, so that state stays bounded."""
_EXAMPLES: Final = 5
_SURE_FIRST: Final = [str(member) for member in Confidence]


@dataclass(frozen=True)
class ZeroHitConfig:
    """Thresholds; tokens, seconds, a probability, requests."""

    min_tokens: int = 256
    min_requests: int = 3
    window: float = 1800.0
    accident: float = 1e-6
    recovery: int = 10


class _Item(msgspec.Struct, array_like=True):
    """What is kept of one request of the run."""

    finish_time: float
    request_id: str
    expected: int
    servable: int
    lost: int
    verdict: str
    cause: str | None
    confidence: str
    group: int | None
    next_step: str


class _Sums(msgspec.Struct):
    """The run of an open incident; it may be of any length."""

    opened_at: float
    first: str
    since: float
    until: float
    requests: int = 0
    expected: int = 0
    servable: int = 0
    lost: int = 0
    verdicts: dict[str, int] = {}
    causes: dict[str, int] = {}
    next_steps: dict[str, str] = {}
    """Newest next step, by cause."""
    confidence: str = ""
    groups: list[int] = []
    examples: list[str] = []
    drafter_groups: list[int] = []
    annotated_drafter_groups: list[int] = []


class _State(msgspec.Struct):
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
    run: list[_Item] = []
    served_in_a_row: int = 0
    open: _Sums | None = None


class ZeroHit:
    """See :class:`kvlens.dashboard.detect.base.Detector`."""

    kind: Final = IncidentKind.ZERO_HIT

    def __init__(self, config: ZeroHitConfig | None = None) -> None:
        self._config = config or ZeroHitConfig()
        self._states: dict[str, _State] = {}

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        state = self._states.get(record.incarnation_id)
        if state is None:
            state = self._states[record.incarnation_id] = _State(
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
        return _incident(incarnation_id, state, state.open, at, ENGINE_GONE)

    def dump(self, incarnation_id: str) -> bytes | None:
        """State of one incarnation, to survive a restart; None when there is none."""
        state = self._states.get(incarnation_id)
        return None if state is None else msgspec.msgpack.encode(state)

    def load(self, incarnation_id: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""
        self._states[incarnation_id] = msgspec.msgpack.decode(state, type=_State)

    def _served(self, record: RequestRecord, state: _State) -> None:
        """End the run; what finished before this request becomes history."""
        state.served_until = max(state.served_until, record.finish_time)
        state.eligible += 1 / record.sampling_probability
        before = [item for item in state.run if item.finish_time <= record.finish_time]
        state.eligible += len(before)
        state.failed += len(before)
        del state.run[: len(before)]

    def _failed(self, record: RequestRecord, engine: EngineInfo, state: _State) -> Incident | None:
        if record.finish_time < state.served_until:  # arrived late
            state.eligible += 1
            state.failed += 1
            return None
        insort(state.run, _item(record), key=lambda item: item.finish_time)
        oldest = state.newest - self._config.window
        while state.run[0].finish_time < oldest or len(state.run) > _LONGEST_RUN:
            del state.run[0]
        if len(state.run) < self._needed(state):
            return None
        used, annotated = _drafter_groups(record, engine)
        state.open = _Sums(
            opened_at=state.run[-1].finish_time,
            first=state.run[0].request_id,
            since=state.run[0].finish_time,
            until=state.run[0].finish_time,
            drafter_groups=used,
            annotated_drafter_groups=annotated,
        )
        for item in state.run:
            _add(state.open, item)
        state.run.clear()
        return _incident(record.incarnation_id, state, state.open)

    def _while_open(self, record: RequestRecord, state: _State, run: _Sums) -> Incident | None:
        if not record.served_tokens:
            state.served_in_a_row = 0
            _add(run, _item(record))
            return _incident(record.incarnation_id, state, run)
        state.served_in_a_row += 1
        state.served_until = max(state.served_until, record.finish_time)
        if state.served_in_a_row < self._config.recovery:
            return None
        closed = _incident(record.incarnation_id, state, run, record.finish_time, RECOVERED)
        state.open, state.served_in_a_row = None, 0
        return closed

    def _needed(self, state: _State) -> int:
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


def _item(record: RequestRecord) -> _Item:
    return _Item(
        record.finish_time, record.internal_request_id, record.expected_tokens,
        record.servable_tokens, record.lost_tokens, record.verdict, record.cause,
        record.confidence, record.vetoing_group, record.next_step,
    )  # fmt: skip


def _add(run: _Sums, item: _Item) -> None:
    run.since = min(run.since, item.finish_time)
    run.until = max(run.until, item.finish_time)
    run.requests += 1
    run.expected += item.expected
    run.servable += item.servable
    run.lost += item.lost
    run.verdicts[item.verdict] = run.verdicts.get(item.verdict, 0) + 1
    cause = item.cause or ""
    run.causes[cause] = run.causes.get(cause, 0) + 1
    run.next_steps[cause] = item.next_step or run.next_steps.get(cause, "")
    run.confidence = max(run.confidence or item.confidence, item.confidence, key=_doubt)
    if item.group is not None and item.group not in run.groups:
        run.groups = sorted([*run.groups, item.group])
    if len(run.examples) < _EXAMPLES:
        run.examples.append(item.request_id)


def _doubt(confidence: str) -> int:
    return _SURE_FIRST.index(confidence) if confidence in _SURE_FIRST else len(_SURE_FIRST)


def _drafter_groups(record: RequestRecord, engine: EngineInfo) -> tuple[list[int], list[int]]:
    """Groups popped as drafter groups, and those that the model annotates as such."""
    groups = engine.layout.groups
    used = {group.kv_group for group in groups if group.drafter_used}
    used.update(g.kv_group for lookup in record.lookups for g in lookup.groups if g.drafter)
    return sorted(used), [group.kv_group for group in groups if group.drafter]


def _incident(
    incarnation_id: str,
    state: _State,
    run: _Sums,
    closed_at: float | None = None,
    reason: str | None = None,
) -> Incident:
    cause = Counter(run.causes).most_common(1)[0][0]
    why = f"; cause: {cause.replace('_', ' ')}" if cause else ""
    evidence: dict[str, Any] = {
        "run_length": run.requests,
        "expected_tokens": run.expected,
        "servable_tokens": run.servable,
        "served_tokens": 0,
        "causes": {name or "none": count for name, count in run.causes.items()},
        "drafter_groups": run.drafter_groups,
        "annotated_drafter_groups": run.annotated_drafter_groups,
        "eligible_before": state.eligible,
        "served_nothing_before": state.failed,
    }
    return Incident(
        id=incident_id(IncidentKind.ZERO_HIT, incarnation_id, run.first),
        kind=str(IncidentKind.ZERO_HIT),
        severity=str(Severity.CRITICAL),
        state=OPEN if reason is None else CLOSED,
        engine_id=state.engine_id,
        incarnation_id=incarnation_id,
        model=state.model,
        opened_at=run.opened_at,
        updated_at=max(run.until, closed_at or run.until),
        closed_at=closed_at,
        close_reason=reason,
        verdict=Counter(run.verdicts).most_common(1)[0][0],
        cause=cause or None,
        confidence=run.confidence,
        summary=(
            f"{run.requests:,} requests were served 0 of {run.expected:,} tokens that offloading "
            f"should have served{why}"
        ),
        evidence=evidence,
        next_step=run.next_steps[cause],
        groups=list(run.groups),
        example_requests=list(run.examples),
        lost_tokens=run.lost,
        requests=run.requests,
        scope=Scope(
            since=run.since,
            until=run.until,
            min_expected_tokens=state.min_tokens,
            max_served_tokens=0,
        ),
    )
