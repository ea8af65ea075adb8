"""The run of requests that ``zero_hit`` follows, and the incident made of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

import msgspec

from kvlens.dashboard.detect.base import CLOSED, OPEN, Incident, Scope, incident_id
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Confidence, IncidentKind, Severity

_EXAMPLES: Final = 5
_SURE_FIRST: Final = [str(member) for member in Confidence]


class Item(msgspec.Struct, array_like=True):
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


class Run(msgspec.Struct):
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


class State(msgspec.Struct):
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
    open: Run | None = None


def item_of(record: RequestRecord) -> Item:
    """Keep what a run needs of one request."""
    return Item(
        record.finish_time, record.internal_request_id, record.expected_tokens,
        record.servable_tokens, record.lost_tokens, record.verdict, record.cause,
        record.confidence, record.vetoing_group, record.next_step,
    )  # fmt: skip


def add(run: Run, item: Item) -> None:
    """Count one request, in any order of finish times."""
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


def drafter_groups(record: RequestRecord, engine: EngineInfo) -> tuple[list[int], list[int]]:
    """Groups popped as drafter groups, and those that the model annotates as such."""
    groups = engine.layout.groups
    used = {group.kv_group for group in groups if group.drafter_used}
    used.update(g.kv_group for lookup in record.lookups for g in lookup.groups if g.drafter)
    return sorted(used), [group.kv_group for group in groups if group.drafter]


def incident_of(
    incarnation_id: str,
    state: State,
    run: Run,
    closed_at: float | None = None,
    reason: str | None = None,
) -> Incident:
    """Say what the run amounts to; with ``reason`` the incident is closed."""
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
