"""What a detector is, and what it reports.

Detectors see finished requests in the order of their finish times and keep no
clock of their own: the same records give the same incidents, live or replayed.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Protocol

import msgspec

from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import IncidentKind

OPEN: Final = "open"
CLOSED: Final = "closed"
RECOVERED: Final = "recovered"
ENGINE_GONE: Final = "engine_gone"


class Scope(msgspec.Struct, kw_only=True, frozen=True):
    """Which requests an incident is about: a filter, so that it stays small."""

    since: float
    """Finish time of the first request, Unix seconds."""
    until: float
    """Finish time of the newest one, inclusive."""
    min_expected_tokens: int = 0
    max_served_tokens: int | None = None


class Incident(msgspec.Struct, kw_only=True, frozen=True):
    """One finding about one engine incarnation. Times are the records' own, Unix seconds."""

    id: str
    kind: str
    severity: str
    state: str
    """``open`` or ``closed``."""
    engine_id: str
    incarnation_id: str
    model: str
    opened_at: float
    updated_at: float
    closed_at: float | None = None
    close_reason: str | None = None
    """``recovered`` or ``engine_gone``."""
    verdict: str
    cause: str | None
    confidence: str
    summary: str
    evidence: dict[str, Any]
    next_step: str
    groups: list[int]
    """KV groups that brought requests to zero."""
    example_requests: list[str]
    """Internal request ids, oldest first."""
    lost_tokens: int
    requests: int
    scope: Scope


class Detector(Protocol):
    """Turns requests into incidents, one incarnation at a time, on one thread."""

    @property
    def kind(self) -> IncidentKind:
        """The only kind of incident that this detector reports."""

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Forget an incarnation that ended at ``at``; return its incident, now closed."""

    def dump(self, incarnation_id: str) -> bytes | None:
        """State of one incarnation, to survive a restart; None when there is none."""

    def load(self, incarnation_id: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""


def incident_id(kind: IncidentKind, incarnation_id: str, first_request: str) -> str:
    """Return an id that a replay of the same records gives again."""
    digest = hashlib.sha256(f"{kind}\0{incarnation_id}\0{first_request}".encode()).hexdigest()
    return f"{kind}-{digest[:12]}"
