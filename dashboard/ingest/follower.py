"""Detection where several dashboards share a store: one of them runs it, for all.

The leader reads what any dashboard stored and feeds the detectors on a thread of its
own; the others read which incidents changed and show them. A leader that goes is
followed by another, which takes up its states from the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from kvlens.dashboard.detect.engine import Detection
from kvlens.dashboard.ingest.writer import Audience
from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.model.incident import OPEN, Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.records import EngineInfo, RequestRecord

_TICK: Final = 0.5
_CHUNK: Final = 2000
"""Records read at once."""
_OVERLAP_NS: Final = 15_000_000_000
"""How late a record may become visible after those with a higher ``seq``."""
_OVERLAP: Final = 15.0
"""The same for changed incidents, seconds."""
_SCRAPES: Final = 10_000
_FLUSH_EVERY: Final = 10.0
"""Seconds between two savings of states without a changed incident."""
_logger = logging.getLogger(__name__)


class SharedStore(Store, Protocol):
    """A store that several dashboards use at once."""

    def lead(self) -> bool:
        """Whether this dashboard runs the detectors, for now; called twice a second."""

    def incarnations(self) -> list[tuple[EngineInfo, float | None]]:
        """All engines, and when each ended."""

    def seqs_after(self, seq: int) -> list[int]:
        """All higher ones."""

    def records_at(self, seqs: Sequence[int]) -> list[tuple[int, RequestRecord]]:
        """Records with these ``seq``, in its order."""

    def deferrals_after(self, seq: int) -> list[tuple[int, RequestRecord]]:
        """Reports of waiting requests with a higher ``seq``, in its order."""


class FollowerAudience:
    """The writer's audience: who acted on an incident here is heard of by the leader."""

    def __init__(self, audience: Audience, show: Callable[[Incident], None]) -> None:
        self.requests = audience.requests
        self.engine = audience.engine
        self.incident = show


class IncidentPublisher(Protocol):
    """Who hears of incidents."""

    def show(self, incident: Incident) -> None:
        """Show it on this dashboard's pages."""

    def incident(self, incident: Incident) -> None:
        """Show it, and notify those who want to know."""


class LeaderNotifier(Protocol):
    """Who notifies while this dashboard leads."""

    def adopt(self, open_incidents: Sequence[Incident]) -> None:
        """Take over notifications of these."""

    def release(self) -> None:
        """Leave them to another dashboard."""


class Follower:
    """Stands in for detection in :class:`~kvlens.dashboard.ingest.writer.Writer`."""

    def __init__(
        self,
        store: SharedStore,
        make_detection: Callable[[], Detection],
        publisher: IncidentPublisher,
        notifier: LeaderNotifier,
        metrics: SelfMetrics,
    ) -> None:
        """``make_detection`` makes one that has not been restored."""
        self._store = store
        self._make_detection = make_detection
        self._publisher = publisher
        self._notifier = notifier
        self._metrics = metrics
        self._detection: Detection | None = None
        self._seen: set[int] = set()
        self._newest = 0
        self._waiting_seq = 0
        self._next_flush = 0.0
        self._ended: set[str] = set()
        self._scrapes: deque[Scrape] = deque(maxlen=_SCRAPES)
        self._shown: dict[str, tuple[Incident, Handling]] = {}
        self._polled_at = time.time()
        self._heard_before: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlens-follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and keep the detectors' states."""
        self._end.set()
        self._thread.join()

    @property
    def leads(self) -> bool:
        """Whether detection runs here."""
        return self._detection is not None

    # --- called by the writer ------------------------------------------------------

    def process(
        self,
        records: Sequence[tuple[int, RequestRecord]],
        ended: Sequence[tuple[str, float]] = (),
        engines: Iterable[EngineInfo] = (),
        deferrals: Sequence[RequestRecord] = (),
        scrapes: Sequence[Scrape] = (),
    ) -> None:
        """Only scrapes are taken here: the store hands all else to whoever leads."""
        self._scrapes.extend(scrapes)

    def listen(self, heard_before: float) -> Sequence[str]:
        """Left to the thread, and there to whoever leads."""
        self._heard_before = heard_before
        return ()

    def flush(self) -> None:
        """The states are kept by the thread."""

    # --- the thread ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.wait(_TICK):
            self._guarded(self.tick)
        if self._detection is not None:
            self._guarded(self._detection.flush)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._metrics.errors.inc()
            _logger.exception("detection has to wait for the store, will try again")

    def tick(self) -> None:
        """Lead or follow once; raises what the store raises."""
        try:
            leads = self._store.lead()
        except Exception:
            self._step_down()  # without the store nobody knows who leads
            raise
        if leads and self._detection is None:
            self._step_up()
        elif not leads:
            self._step_down()
        if self._detection is not None:
            self._detect(self._detection)
        self._relay()

    def _step_up(self) -> None:
        _logger.info("this dashboard runs the detectors now")
        detection = self._make_detection()
        detection.end_silent(detection.load())
        self._newest = detection.checkpoint
        since = max(self._newest - _OVERLAP_NS, 0)
        # The last leader has seen these; what is stored since then is fed here.
        self._seen = {seq for seq in self._store.seqs_after(since) if seq <= self._newest}
        self._waiting_seq = time.time_ns() - _OVERLAP_NS
        self._ended.clear()
        self._notifier.adopt(self._store.incidents(OPEN))
        self._detection = detection

    def _step_down(self) -> None:
        if self._detection is not None:
            _logger.info("another dashboard runs the detectors now")
            self._detection = None
            self._seen.clear()
            self._notifier.release()

    def _detect(self, detection: Detection) -> None:
        states = self._store.incarnations()
        ended = [
            (info.incarnation_id, at)
            for info, at in states
            if at is not None and info.incarnation_id not in self._ended
        ]
        deferrals = self._store.deferrals_after(self._waiting_seq)
        self._waiting_seq = max([self._waiting_seq, *(seq for seq, _ in deferrals)])
        scrapes = [self._scrapes.popleft() for _ in range(len(self._scrapes))]
        engines = [info for info, _ in states]
        waiting = [record for _, record in deferrals]
        while True:
            records = self._unseen()
            detection.process(records, ended, engines, waiting, scrapes)
            self._ended.update(ident for ident, _ in ended)
            self._seen.update(seq for seq, _ in records)
            self._newest = max(self._newest, detection.checkpoint)
            if len(records) < _CHUNK:
                break
            ended, waiting, scrapes = [], [], []
        self._seen = {seq for seq in self._seen if seq > self._newest - _OVERLAP_NS}
        if self._heard_before is not None:
            detection.listen(self._heard_before)
            self._heard_before = None
        if time.monotonic() >= self._next_flush:
            self._next_flush = time.monotonic() + _FLUSH_EVERY
            detection.flush()

    def _unseen(self) -> list[tuple[int, RequestRecord]]:
        since = max(self._newest - _OVERLAP_NS, 0)
        fresh = [seq for seq in self._store.seqs_after(since) if seq not in self._seen]
        return self._store.records_at(fresh[:_CHUNK])

    def _relay(self) -> None:
        """Show incidents that another dashboard, or a person at one, changed."""
        began = time.time()
        changed = self._store.incidents(changed_since=self._polled_at - _OVERLAP)
        done = self._store.handling([incident.id for incident in changed])
        tell = self._publisher.incident if self._detection is not None else self._publisher.show
        for incident in changed:
            state = incident, done[incident.id]
            if self._shown.get(incident.id) != state:
                tell(incident)
        self._shown = {incident.id: (incident, done[incident.id]) for incident in changed}
        self._polled_at = began
