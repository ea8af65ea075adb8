"""What the dashboard asks of a store, whichever database is behind it.

``append``, ``silence``, ``save_detection`` and ``maintain`` are called by the one
writer thread (of a shared store, the middle two by the thread that detects);
everything else may be called from any thread at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from kvlens.dashboard.detect.base import Incident
from kvlens.dashboard.scrape.reading import Scrape
from kvlens.dashboard.store.actions import Action, Handling
from kvlens.telemetry.records import EngineInfo, RequestRecord

STOPPED: Final = "stopped"
REPLACED: Final = "replaced"
"""A later incarnation of the same engine has started."""
SILENT: Final = "silent"
"""Nothing was heard of it for long: it crashed, or is cut off."""


class StoreError(RuntimeError):
    """The store cannot be opened or written; the message says what to change."""


class TooSlowError(RuntimeError):
    """Finding a page was given up; the message says what to change."""


class EngineEvent(NamedTuple):
    """An engine's connector started or stopped."""

    incarnation_id: str
    state: str
    """``semconv.ENGINE_STARTED``, ``ENGINE_ALIVE`` or ``ENGINE_STOPPED``."""
    time: float


class Row(NamedTuple):
    """One request on its way into the store."""

    record: RequestRecord
    body: bytes
    """The record's JSON as received, packed by :func:`kvlens.dashboard.store.codec.pack`."""


class Batch(NamedTuple):
    """The accepted part of one export."""

    engines: Sequence[tuple[EngineInfo, float]] = ()
    """Who sent it, each with the newest time that it reported."""
    events: Sequence[EngineEvent] = ()
    rows: Sequence[Row] = ()
    actions: Sequence[Action] = ()
    deferrals: Sequence[RequestRecord] = ()
    """Reports of requests that wait: for the detectors, not kept."""
    scrapes: Sequence[Scrape] = ()
    """The same for numbers read from servers."""


class Appended(NamedTuple):
    """What became durable: without duplicates, in the order of ``seq``."""

    records: Sequence[tuple[int, RequestRecord]]
    """``(seq, record)``; ``seq`` only grows."""
    duplicates: int
    touched: frozenset[str]
    """Incarnations that sent something."""
    ended: Sequence[tuple[str, float]]
    """Incarnations that ended with this call, and when."""
    acted_on: Sequence[str] = ()
    """Incidents about which somebody did something."""


class Upkeep(NamedTuple):
    """What one step of retention did."""

    more: bool = False
    """Whether there is more to do."""
    deleted: int = 0
    """Requests deleted by this step."""
    size: int | None = None
    """Bytes in use; None where the store's size is not limited by us."""


class GroupTotals(msgspec.Struct, kw_only=True):
    """Sums over requests of one KV-cache group, weighted like :class:`Totals`; chunks."""

    lookups: float = 0
    """Requests whose answer came after asking this group."""
    width: float = 0
    """Chunks asked for in those answers."""
    hits: float = 0
    """Chunks found, before the pop."""
    pops: float = 0
    vetoes: float = 0
    """Requests that this group brought to zero."""
    stored: float = 0
    loaded: float = 0
    held_back: float = 0
    refused: float = 0
    resident: float = 0
    """Chunks in the tier, summed over ``samples`` records."""
    samples: float = 0


class Totals(msgspec.Struct, kw_only=True):
    """Sums over requests, weighted by 1 / sampling probability; tokens, seconds."""

    requests: dict[str, float] = {}
    """By verdict."""
    expected_tokens: float = 0
    servable_tokens: float = 0
    served_tokens: float = 0
    lost_tokens: float = 0
    loads: float = 0
    reload_seconds: float = 0
    """Sum of reload latencies."""
    reload_buckets: list[float] = []
    """Loads per bucket of ``semconv.TRANSFER_BUCKETS``, not cumulative, last = beyond all."""
    lost_by_cause: dict[str, float] = {}
    """Lost tokens by cause."""
    evicted_tokens: float = 0
    """Tokens computed again because capacity had evicted their chunks."""
    lost_gpu_seconds: float = 0
    """Device time of computing lost and evicted tokens."""
    deferrals: float = 0
    """Requests whose lookup was deferred."""
    deferral_seconds: float = 0
    reuse_buckets: list[float] = []
    """Requests that used a chunk again, by the distinct chunks used in between: bucket ``n``
    holds distances below ``2 ** n`` chunks that no smaller bucket holds."""
    groups: dict[int, GroupTotals] = {}
    """By ``kv_group``."""


class Point(Totals, kw_only=True):
    """:class:`Totals` of the requests that finished in ``[time, time + step)``."""

    time: int


class Engine(msgspec.Struct, kw_only=True):
    """One incarnation of an engine, as far as it is known."""

    info: EngineInfo
    first_seen: float
    last_seen: float
    """Newest time that the engine itself reported, by more than that it lives."""
    ended_at: float | None
    end_reason: str | None
    """:data:`STOPPED`, :data:`REPLACED` or :data:`SILENT`; only the last may be taken back."""
    totals: Totals
    open_incidents: int


Sort = Literal["newest", "oldest", "lost", "served", "expected"]
"""By finish time, or by tokens, most first: then without those that have none."""


class RequestQuery(msgspec.Struct, kw_only=True, frozen=True):
    """Filters, all of which must hold; None = no filter."""

    since: float | None = None
    """Finish time at least, Unix seconds."""
    until: float | None = None
    """Finish time at most."""
    engine: str | None = None
    """Incarnation id or engine id."""
    verdicts: tuple[str, ...] = ()
    cause: str | None = None
    model: str | None = None
    min_lost_tokens: int = 0
    min_expected_tokens: int = 0
    max_served_tokens: int | None = None
    sort: Sort = "newest"
    limit: int = 100
    cursor: str | None = None


class Page(NamedTuple):
    """Requests in the wanted order, and where the next page starts."""

    records: list[RequestRecord]
    next_cursor: str | None


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

    def requests(self, query: RequestQuery) -> Page:
        """One page; raises ``ValueError`` for a cursor that is not ours.

        Raises :class:`TooSlowError` if it would take too long.
        """

    def request(self, ident: str) -> RequestRecord | None:
        """By internal or external id; of several, the newest."""

    def series(self, since: float, until: float, step: int, engine: str | None) -> list[Point]:
        """Sums per ``step`` seconds (a multiple of 60), oldest first, empty ones left out."""

    def close(self) -> None:
        """Release files and connections; no call may follow."""
