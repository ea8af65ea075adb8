"""What an incident has seen so far, however many requests that was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvlens.dashboard.model.incident import CLOSED, OPEN, Incident, RequestScope, incident_id
from kvlens.telemetry.records import RequestRecord
from kvlens.telemetry.semconv import Confidence

_EXAMPLES: Final = 5
_SURE_FIRST: Final = [str(member) for member in Confidence]


class Item(msgspec.Struct, array_like=True):
    """What is kept of one request until it is clear whether it belongs to an incident."""

    finish_time: float
    internal_request_id: str
    expected_tokens: int
    servable_tokens: int
    lost_tokens: int
    verdict: str
    cause: str | None
    confidence: str
    vetoing_group: int | None
    next_step: str


def item_of(record: RequestRecord) -> Item:
    """Keep what a tally needs of one request."""
    return Item(*(getattr(record, name) for name in Item.__struct_fields__))


class Tally(msgspec.Struct):
    """Sums over the affected requests, and what they had to say."""

    first: str = ""
    since: float = math.inf
    until: float = -math.inf
    requests: int = 0
    lost: int = 0
    verdicts: dict[str, int] = {}
    causes: dict[str, int] = {}
    next_steps: dict[str, str] = {}
    """Newest next step, by cause."""
    confidence: str = ""
    groups: list[int] = []
    examples: list[str] = []
    numbers: dict[str, float] = {}
    """Sums, by name; other requests may have added to them too."""
    facts: dict[str, Any] = {}
    """What cannot be summed: the newest, by name."""

    def add(self, record: RequestRecord | Item) -> None:
        """Count one affected request, in any order of finish times."""
        self.first = self.first or record.internal_request_id
        self.since = min(self.since, record.finish_time)
        self.until = max(self.until, record.finish_time)
        self.requests += 1
        self.lost += record.lost_tokens
        cause = record.cause or ""
        _count(self.verdicts, record.verdict)
        _count(self.causes, cause)
        self.next_steps[cause] = record.next_step or self.next_steps.get(cause, "")
        self.confidence = max(self.confidence or record.confidence, record.confidence, key=_doubt)
        self._name(record.vetoing_group, [record.internal_request_id])

    def sum(self, numbers: Mapping[str, float], facts: Mapping[str, Any] | None = None) -> None:
        """Add to the sums, and note facts."""
        for name, value in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0) + value
        self.facts.update(facts or {})

    def merge(self, other: Tally) -> None:
        """Take in a later one."""
        self.first = self.first or other.first
        self.since = min(self.since, other.since)
        self.until = max(self.until, other.until)
        self.requests += other.requests
        self.lost += other.lost
        for mine, theirs in ((self.verdicts, other.verdicts), (self.causes, other.causes)):
            for name, count in theirs.items():
                _count(mine, name, count)
        for cause, step in other.next_steps.items():
            self.next_steps[cause] = step or self.next_steps.get(cause, "")
        if other.confidence:
            self.confidence = max(self.confidence or other.confidence, other.confidence, key=_doubt)
        for group in other.groups:
            self._name(group, [])
        self._name(None, other.examples)
        self.sum(other.numbers, other.facts)

    def _name(self, group: int | None, examples: list[str]) -> None:
        if group is not None and group not in self.groups:
            self.groups = sorted([*self.groups, group])
        new = [item for item in examples if item not in self.examples]
        self.examples += new[: _EXAMPLES - len(self.examples)]

    @property
    def cause(self) -> str | None:
        """The most common cause."""
        return (_most(self.causes) or None) if self.causes else None

    @property
    def verdict(self) -> str:
        """The most common verdict."""
        return _most(self.verdicts)

    @property
    def next_step(self) -> str:
        """What the requests with the most common cause advise."""
        return self.next_steps.get(self.cause or "", "")

    def causes_named(self) -> dict[str, int]:
        """Requests by cause, for evidence."""
        return {name or "none": count for name, count in self.causes.items()}


def _most(counts: dict[str, int]) -> str:
    return Counter(counts).most_common(1)[0][0]


def _count(counts: dict[str, int], name: str, more: int = 1) -> None:
    counts[name] = counts.get(name, 0) + more


def _doubt(confidence: str) -> int:
    return _SURE_FIRST.index(confidence) if confidence in _SURE_FIRST else len(_SURE_FIRST)


class Subject(msgspec.Struct, frozen=True):
    """Who an incident is about."""

    engine_id: str
    incarnation_id: str
    model: str


def incident(
    kind: str,
    severity: str,
    subject: Subject,
    tally: Tally,
    opened_at: float,
    *,
    summary: str,
    evidence: dict[str, Any],
    next_step: str = "",
    scope: Mapping[str, Any] | None = None,
    closed: tuple[float, str] | None = None,
) -> Incident:
    """Make an incident of a tally; ``closed`` is when and why, ``scope`` filters requests."""
    closed_at, reason = closed or (None, None)
    return Incident(
        id=incident_id(kind, subject.incarnation_id, tally.first),
        kind=str(kind),
        severity=str(severity),
        state=OPEN if closed is None else CLOSED,
        engine_id=subject.engine_id,
        incarnation_id=subject.incarnation_id,
        model=subject.model,
        opened_at=opened_at,
        updated_at=max(tally.until, closed_at or tally.until),
        closed_at=closed_at,
        close_reason=reason,
        verdict=tally.verdict,
        cause=tally.cause,
        confidence=tally.confidence,
        summary=summary,
        evidence=evidence,
        next_step=next_step or tally.next_step,
        groups=list(tally.groups),
        example_requests=list(tally.examples),
        lost_tokens=tally.lost,
        requests=tally.requests,
        scope=RequestScope(since=tally.since, until=tally.until, **(scope or {})),
    )
