"""What the dashboard asks of a store, whichever database is behind it.

``append``, ``silence``, ``save_detection`` and ``maintain`` are called by the one
writer thread (of a shared store, the middle two by the thread that detects);
everything else may be called from any thread at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvlens.dashboard.model.actions import Action, Handling
from kvlens.dashboard.model.batch import Appended, Batch
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.query import FoundRequests, RequestQuery
from kvlens.dashboard.model.totals import Point
from kvlens.telemetry.records import RequestRecord


class StoreError(RuntimeError):
    """The store cannot be opened or written; the message says what to change."""


class TooSlowError(RuntimeError):
    """Finding a page was given up; the message says what to change."""


class Upkeep(NamedTuple):
    """What one step of retention did."""

    more: bool = False
    """Whether there is more to do."""
    deleted: int = 0
    """Requests deleted by this step."""
    size: int | None = None
    """Bytes in use; None where the store's size is not limited by us."""


class DetectionState(NamedTuple):
    """Where detection stood when it was last saved."""

    checkpoint: int
    """Highest ``seq`` that the detectors have seen."""
    states: list[tuple[str, str, bytes]]
    """``(detector kind, incarnation id, state)``."""


class Store(Protocol):
    """See the module's text for which thread calls what."""

    @property
    def shared(self) -> bool:
        """Whether other processes use it too; see :mod:`kvlens.dashboard.ingest.follower`."""

    def append(self, batches: Sequence[Batch]) -> Appended:
        """Make all batches durable in one transaction, then return."""

    def silence(self, heard_before: float) -> list[tuple[str, float]]:
        """End engines of which no dashboard heard since then (Unix seconds, dashboards' clocks).

        Returns ``(incarnation id, when last heard of)``. One that is heard of again is alive.
        """

    def save_detection(
        self,
        checkpoint: int,
        incidents: Sequence[Incident],
        states: Sequence[tuple[str, str, bytes | None]],
    ) -> None:
        """Keep incidents and detector states together; a state of None is deleted."""

    def load_detection(self) -> DetectionState:
        """Return what :meth:`save_detection` kept last."""

    def records_after(self, seq: int, limit: int) -> list[tuple[int, RequestRecord]]:
        """Records with a higher ``seq``, in its order."""

    def maintain(self, now: float) -> Upkeep:
        """Do one small step of retention."""

    def engines(self) -> list[Engine]:
        """All incarnations, newest start first."""

    def engine(self, ident: str) -> Engine | None:
        """By incarnation id, or the newest incarnation of an engine id."""

    def incidents(
        self,
        state: str | None = None,
        *,
        engine: str | None = None,
        at: float | None = None,
        changed_since: float | None = None,
        limit: int | None = None,
    ) -> list[Incident]:
        """Incidents that pass all given filters, newest first, at most ``limit`` of them.

        ``engine`` is an incarnation id or an engine id, ``at`` a finish time in the incident's
        scope, ``changed_since`` Unix seconds of this machine. Filter here, never afterwards: a
        list that was cut first lacks old incidents that are still open.
        """

    def incident(self, ident: str) -> Incident | None:
        """By id."""

    def handling(self, idents: Sequence[str]) -> dict[str, Handling]:
        """What people did about each of these incidents, by id."""

    def actions(self, before: float | None = None, limit: int = 200) -> list[Action]:
        """Return the audit log, newest first: entries with a time below ``before``."""

    def requests(self, query: RequestQuery) -> FoundRequests:
        """One page; raises ``ValueError`` for a cursor that is not ours.

        Raises :class:`TooSlowError` if it would take too long.
        """

    def request(self, ident: str) -> RequestRecord | None:
        """By internal or external id; of several, the newest."""

    def series(self, since: float, until: float, step: int, engine: str | None) -> list[Point]:
        """Sums per ``step`` seconds (a multiple of 60), oldest first, empty ones left out."""

    def close(self) -> None:
        """Release files and connections; no call may follow."""
