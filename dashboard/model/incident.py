"""What a detector found: an incident, and the requests that it is about."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

OPEN: Final = "open"
CLOSED: Final = "closed"
RECOVERED: Final = "recovered"
ENGINE_GONE: Final = "engine_gone"


class RequestScope(msgspec.Struct, kw_only=True, frozen=True):
    """Which requests an incident is about: a filter, so that it stays small."""

    since: float
    """Finish time of the first request, Unix seconds."""
    until: float
    """Finish time of the newest one, inclusive."""
    min_expected_tokens: int = 0
    max_served_tokens: int | None = None
    min_lost_tokens: int = 0
    verdicts: tuple[str, ...] = ()
    """Any of these; empty = all."""
    cause: str | None = None


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
    engines: list[str] = []
    """Ids of all engines affected, where it is more than ``engine_id``."""
    example_requests: list[str]
    """Internal request ids, oldest first."""
    lost_tokens: int
    requests: int
    scope: RequestScope


def incident_id(kind: str, incarnation_id: str, first_request: str) -> str:
    """Return an id that a replay of the same records gives again."""
    digest = hashlib.sha256(f"{kind}\0{incarnation_id}\0{first_request}".encode()).hexdigest()
    return f"{kind}-{digest[:12]}"
