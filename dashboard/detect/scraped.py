"""Incidents from scraped numbers: of stock engines, and of instrumented ones that send no records.

The checks are those of ``kvlens doctor``, over a window that moves with the
scrapes. A server that starts anew is another incarnation: its counters begin
at 0 and its caches empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvlens.dashboard.model.incident import (
    CLOSED,
    ENGINE_GONE,
    OPEN,
    RECOVERED,
    Incident,
    RequestScope,
    incident_id,
)
from kvlens.dashboard.model.scrape import Reading, Scrape
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.dashboard.scrape.checks import examine, lookup_fallback, telemetry_lost
from kvlens.dashboard.scrape.findings import FINE, Finding, Outcome
from kvlens.dashboard.scrape.window import Window, restarted
from kvlens.telemetry.semconv import Confidence, IncidentKind, Severity

_SLOTS: Final = 20
"""Readings kept of a window."""
_SILENCE: Final = "silence"
"""Its incident is kept apart: it ends with the next answer, whatever that says."""
_TELL_EVERY: Final = 60.0
"""Seconds after which an open incident is told again with newer numbers."""


class Kept(msgspec.Struct):
    """One reading and when it was taken."""

    time: float
    reading: Reading


class State(msgspec.Struct):
    """One engine behind one target."""

    target: str
    engine: str
    model: str
    incarnation_id: str
    last_seen: float
    readings: list[Kept] = []
    """Oldest first; the newest two may be close to each other."""
    open: dict[str, Incident] = {}
    """By kind."""


class Scraped:
    """See :class:`kvlens.dashboard.detect.base.Stateful`; keys are target and engine."""

    kind = "scraped"

    def __init__(self, thresholds: ThresholdsFor = defaults) -> None:
        self._thresholds = thresholds
        self._states: dict[str, State] = {}
        self.dirty: set[str] = set()

    def dump(self, key: str) -> bytes | None:
        """State under ``key``; None when there is none (any more)."""
        state = self._states.get(key)
        return None if state is None else msgspec.msgpack.encode(state)

    def load(self, key: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""
        self._states[key] = msgspec.msgpack.decode(state, type=State)

    def take(self, scrape: Scrape, models_told: Callable[[str], bool]) -> list[Incident]:
        """Take one scrape; return incidents that opened, changed or closed.

        ``models_told`` says of a model whether its engines send records: those
        say more, so that of the numbers only what records cannot tell is used.
        """
        if scrape.gone:
            return list(self._gone(scrape))
        if scrape.error:
            return list(self._silent(scrape))
        changed: list[Incident] = []
        for reading in scrape.readings:
            changed += self._engine(scrape, reading, models_told)
        return changed

    def _engine(
        self, scrape: Scrape, reading: Reading, models_told: Callable[[str], bool]
    ) -> Iterator[Incident]:
        key = f"{scrape.target}/{reading.engine}/{reading.model}"
        state = self._states.get(key)
        if state is not None and restarted(state.readings[-1].reading, reading):
            yield from _close_all(state, scrape.time, ENGINE_GONE)
            state = None
        limits = self._thresholds(reading.model)
        if state is None:
            began = int(reading.started_at or scrape.time)
            state = State(
                scrape.target, reading.engine, reading.model, f"{key}@{began}", scrape.time
            )
            self._states[key] = state
        if _keep(state, Kept(scrape.time, reading), limits.scrape_window_seconds):
            self.dirty.add(key)
        state.last_seen = scrape.time
        if (silence := state.open.pop(_SILENCE, None)) is not None:
            self.dirty.add(key)
            yield _closed(silence, scrape.time, RECOVERED)
        if len(state.readings) < 2:
            return
        window = _window(state)
        told = reading.instrumented and models_told(reading.model)
        outcomes = (
            [telemetry_lost(window, limits), lookup_fallback(window, limits)]
            if told
            else examine(window, limits)
        )
        for outcome in outcomes:
            if (incident := _decide(state, window, outcome, scrape.time)) is not None:
                self.dirty.add(key)
                yield incident

    def _silent(self, scrape: Scrape) -> Iterator[Incident]:
        """A target that answered before and does not now."""
        for key, state in self._states.items():
            limits: Thresholds = self._thresholds(state.model)
            quiet = scrape.time - state.last_seen
            if state.target != scrape.target or quiet < limits.scrape_silence_seconds:
                continue
            if _SILENCE not in state.open:
                finding = Finding(
                    kind=str(IncidentKind.TELEMETRY_LOST),
                    severity=Severity.WARNING,
                    confidence=Confidence.CERTAIN,
                    status="",
                    summary=f"the target has not answered for {quiet:.0f} s: {scrape.error}",
                    evidence={"last_answer": state.last_seen, "error": scrape.error},
                    next_step="If the server was taken away for good, take it out of the scrape "
                    "targets; else look at its log.",
                )
                self.dirty.add(key)
                yield _open(state, finding, state.last_seen, scrape.time, _SILENCE)

    def _gone(self, scrape: Scrape) -> Iterator[Incident]:
        """The target is no longer configured."""
        for key, state in list(self._states.items()):
            if state.target == scrape.target:
                del self._states[key]
                self.dirty.add(key)
                yield from _close_all(state, scrape.time, ENGINE_GONE)


def _keep(state: State, newest: Kept, window: float) -> bool:
    """Keep enough readings to look back over a window; True if there is one more."""
    readings = state.readings
    spaced = len(readings) < 2 or readings[-1].time - readings[-2].time >= window / _SLOTS
    if not spaced:
        readings.pop()  # the newest always counts, but only some stay
    readings.append(newest)
    # The oldest one stays as long as without it the rest would not reach over the window.
    while len(readings) > 2 and newest.time - readings[1].time >= window:
        del readings[0]
    return spaced


def _window(state: State) -> Window:
    first, last = state.readings[0], state.readings[-1]
    usages = [kept.reading.gpu_usage for kept in state.readings]
    return Window(
        first.reading,
        last.reading,
        last.time - first.time,
        max((usage for usage in usages if usage is not None), default=None),
    )


def _decide(state: State, window: Window, outcome: Outcome, now: float) -> Incident | None:
    known = state.open.get(outcome.kind)
    if outcome.finding is not None:
        if known is not None and now - known.updated_at < _TELL_EVERY:
            return None
        since = now - (window.seconds or 0.0) if known is None else known.scope.since
        return _open(state, outcome.finding, since, now)
    if known is not None and outcome.status == FINE:
        del state.open[outcome.kind]
        return _closed(known, now, RECOVERED)
    return None


def _open(state: State, finding: Finding, since: float, now: float, slot: str = "") -> Incident:
    """Open or update the incident of that kind, or of a slot of its own."""
    slot = slot or finding.kind
    known = state.open.get(slot)
    incident = Incident(
        id=known.id if known else incident_id(slot, state.incarnation_id, repr(now)),
        kind=finding.kind,
        severity=str(finding.severity),
        state=OPEN,
        engine_id=f"{state.target}/{state.engine}",
        incarnation_id=state.incarnation_id,
        model=state.model,
        opened_at=known.opened_at if known else now,
        updated_at=now,
        verdict=finding.status,
        cause=finding.cause,
        confidence=str(finding.confidence),
        summary=finding.summary[0].upper() + finding.summary[1:],
        evidence={**finding.evidence, "source": "scraped metrics"},
        next_step=finding.next_step,
        groups=[],
        example_requests=[],
        lost_tokens=max(finding.lost_tokens, known.lost_tokens if known else 0),
        requests=0,
        scope=RequestScope(since=since, until=now),
    )
    state.open[slot] = incident
    return incident


def _close_all(state: State, at: float, reason: str) -> Iterator[Incident]:
    for incident in state.open.values():
        yield _closed(incident, at, reason)
    state.open = {}


def _closed(incident: Incident, at: float, reason: str) -> Incident:
    return msgspec.structs.replace(
        incident, state=CLOSED, closed_at=at, close_reason=reason, updated_at=at
    )
