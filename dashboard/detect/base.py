"""What a detector is, and what it reports.

Detectors see observations in the order of their times and keep no clock of
their own: the same observations give the same incidents, live or replayed.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.thresholds import ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import IncidentKind


class Stateful(Protocol):
    """Something whose states, by key, are kept across restarts."""

    dirty: set[str]
    """Keys whose state changed since it was last kept; cleared by whoever keeps them."""

    @property
    def kind(self) -> str:
        """The name that its states are kept under."""

    def dump(self, key: str) -> bytes | None:
        """State under ``key``; None when there is none (any more)."""

    def load(self, key: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""


class Detector(Stateful, Protocol):
    """Turns requests into incidents of one kind, on one thread."""

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""

    def deferred(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """The same for a request that still waits; its ``finish_time`` is when it was seen."""

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Forget an incarnation that ended at ``at``; return its incident, now closed."""


StateT = TypeVar("StateT", bound=msgspec.Struct)


class Keyed(Generic[StateT]):
    """Keeps a state per key; implements :class:`Stateful` and what most detectors ignore."""

    kind: IncidentKind

    def __init__(self, state: type[StateT], thresholds: ThresholdsFor = defaults) -> None:
        self._type = state
        self._thresholds = thresholds
        self._states: dict[str, StateT] = {}
        self.dirty: set[str] = set()

    def deferred(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """A request that still waits tells most detectors nothing."""
        return None

    def dump(self, key: str) -> bytes | None:
        """State under ``key``; None when there is none (any more)."""
        state = self._states.get(key)
        return None if state is None else msgspec.msgpack.encode(state)

    def load(self, key: str, state: bytes) -> None:
        """Take up a state from :meth:`dump`."""
        self._states[key] = msgspec.msgpack.decode(state, type=self._type)

    def _touch(self, key: str) -> StateT | None:
        """State under ``key``, which is about to change."""
        self.dirty.add(key)
        return self._states.get(key)

    def _pop(self, key: str) -> StateT | None:
        """Forget the state under ``key`` and return it."""
        if key in self._states:
            self.dirty.add(key)
        return self._states.pop(key, None)
