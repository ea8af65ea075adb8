"""Detectors that watch a share over the newest minutes.

A request weighs something, of which a part may have gone wrong. An incident
opens when the part is too large a share of the window, with enough requests
behind it, and closes when the share has fallen to half of that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Final, NamedTuple

import msgspec

from kvlens.dashboard.detect.base import Keyed
from kvlens.dashboard.detect.tally import Item, Subject, Tally, incident
from kvlens.dashboard.model.incident import ENGINE_GONE, RECOVERED, Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Severity

_SLOTS: Final = 30
"""Parts of a window: it moves in steps of one, so that state stays small at any rate."""


class ShareRule(NamedTuple):
    """When a share is too large."""

    window: float
    """Seconds."""
    share: float
    """Of the window's total; 0 = any."""
    hits: float
    """Sum of :attr:`Weight.hits` within the window, at the least."""
    recovers: bool = True
    """Whether the incident closes when the share has fallen."""


class RequestWeight(NamedTuple):
    """What one request adds to the window."""

    total: float
    bad: float = 0.0
    hits: float = 0.0
    """Above 0: the request is affected, and counts that much towards the minimum."""
    numbers: dict[str, float] = {}
    facts: dict[str, Any] = {}


class Slot(msgspec.Struct):
    """One part of the window."""

    total: float = 0.0
    bad: float = 0.0
    hits: float = 0.0
    tally: Tally = msgspec.field(default_factory=Tally)


class ShareState(msgspec.Struct):
    """One incarnation."""

    engine_id: str
    model: str
    min_tokens: int = 0
    newest: float = -math.inf
    slots: dict[int, Slot] = {}
    """By start time in slot widths."""
    total: float = 0.0
    """Sums over the slots, as are the next two."""
    bad: float = 0.0
    hits: float = 0.0
    open: Tally | None = None
    opened_at: float = 0.0
    memory: dict[str, float] = {}
    """What a detector has to remember of earlier requests, by name."""
    held: list[Item] = []
    """Requests that do not count yet."""


class ShareDetector(Keyed[ShareState]):
    """See the module's text; a detector says what requests weight_of and what it amounts to."""

    severity = Severity.WARNING

    def __init__(self, thresholds: ThresholdsFor = defaults) -> None:
        super().__init__(ShareState, thresholds)

    @abstractmethod
    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open."""

    @abstractmethod
    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """What one request adds; None if it says nothing here."""

    @abstractmethod
    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {}

    def rank(self, tally: Tally, thresholds: Thresholds) -> Severity:
        """How bad it is."""
        return self.severity

    def next_step(self, tally: Tally) -> str:
        """Advice; empty for that of the most common cause."""
        return ""

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        thresholds = self._thresholds(engine.model)
        state = self._states.get(record.incarnation_id) or ShareState(
            engine.engine_id, engine.model
        )
        weight = self.weight_of(record, engine, state, thresholds)
        if weight is None:
            return None
        rule = self.rule(thresholds)
        if not rule.share and not weight.bad and state.open is None:
            return None  # where any share is too large, what is good does not matter
        self.dirty.add(record.incarnation_id)
        self._states[record.incarnation_id] = state
        state.newest = max(state.newest, record.finish_time)
        self._add(record, weight, state, rule)
        return self._decide(record, weight, state, rule, thresholds)

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Forget an incarnation that ended at ``at``; return its incident, now closed."""
        state = self._pop(incarnation_id)
        if state is None or state.open is None:
            return None
        thresholds = self._thresholds(state.model)
        return self._incident(incarnation_id, state, state.open, thresholds, (at, ENGINE_GONE))

    def _add(
        self,
        record: RequestRecord | Item,
        weight: RequestWeight,
        state: ShareState,
        rule: ShareRule,
    ) -> None:
        width = rule.window / _SLOTS
        oldest = int(state.newest // width) - _SLOTS + 1
        number = int(record.finish_time // width)
        if number not in state.slots:
            state.slots = {at: slot for at, slot in state.slots.items() if at >= oldest}
            for name in ("total", "bad", "hits"):
                left = sum(getattr(slot, name) for slot in state.slots.values())
                setattr(state, name, left)
        tallies = [state.open] if state.open is not None else []
        if number >= oldest:
            slot = state.slots.setdefault(number, Slot())
            for sums in (slot, state):
                sums.total += weight.total
                sums.bad += weight.bad
                sums.hits += weight.hits
            tallies = tallies or [slot.tally]
        for tally in tallies:
            tally.sum(weight.numbers, weight.facts)
            if weight.hits:
                tally.add(record)
            elif weight.bad:
                tally.until = max(tally.until, record.finish_time)

    def _decide(
        self,
        record: RequestRecord,
        weight: RequestWeight,
        state: ShareState,
        rule: ShareRule,
        thresholds: Thresholds,
    ) -> Incident | None:
        if state.open is None:
            if state.hits < rule.hits or state.bad <= rule.share * state.total:
                return None
            state.open, state.opened_at = Tally(), record.finish_time
            for _, slot in sorted(state.slots.items()):
                state.open.merge(slot.tally)
                slot.tally = Tally()
        elif rule.recovers and state.bad <= rule.share / 2 * state.total:
            tally, state.open = state.open, None
            closed = (record.finish_time, RECOVERED)
            return self._incident(record.incarnation_id, state, tally, thresholds, closed)
        elif not weight.bad:
            return None
        return self._incident(record.incarnation_id, state, state.open, thresholds)

    def _incident(
        self,
        incarnation_id: str,
        state: ShareState,
        tally: Tally,
        thresholds: Thresholds,
        closed: tuple[float, str] | None = None,
    ) -> Incident:
        numbers = {
            name: int(value) if value.is_integer() else round(value, 6)
            for name, value in ((name, float(value)) for name, value in tally.numbers.items())
        }
        return incident(
            self.kind,
            self.rank(tally, thresholds),
            Subject(state.engine_id, incarnation_id, state.model),
            tally,
            state.opened_at,
            summary=self.summary(tally),
            evidence={**numbers, "causes": tally.causes_named(), **tally.facts},
            next_step=self.next_step(tally),
            scope=self.scope(state),
            closed=closed,
        )
