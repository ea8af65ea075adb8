"""What a check of scraped numbers comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvlens.telemetry.semconv import Confidence, Severity

FOUND: Final = "found"
FINE: Final = "fine"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Finding:
    """Something is wrong; ``kind`` is an ``IncidentKind`` or, for settings, a ``Cause``."""

    kind: str
    severity: Severity
    confidence: Confidence
    status: str
    """A ``Verdict``: what became of requests."""
    summary: str
    next_step: str
    cause: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    lost_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """One check: ``found`` something, ``fine``, or ``unknown`` for want of proof."""

    kind: str
    status: str
    reason: str
    """Why, with the numbers."""
    finding: Finding | None = None


def found(finding: Finding) -> Outcome:
    """A check that found something."""
    return Outcome(finding.kind, FOUND, finding.summary, finding)


def fine(kind: str, reason: str) -> Outcome:
    """A check that found that all is well."""
    return Outcome(str(kind), FINE, reason)


def unknown(kind: str, reason: str) -> Outcome:
    """A check that cannot tell: it stays silent and says what it lacks."""
    return Outcome(str(kind), UNKNOWN, reason)


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` as text."""
    return f"{part / whole:.1%}" if whole else "none"
