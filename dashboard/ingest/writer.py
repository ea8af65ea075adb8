"""The one thread that writes: group commit, then detection, then news to the stream.

An export is acknowledged when its transaction is on disk. The queue is
bounded: a sender that is faster than the disk hears so instead of filling
memory here.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, Protocol

from kvlens.dashboard.model.batch import Appended, Batch
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.store.base import Store, StoreError
from kvlens.telemetry.records import EngineInfo, RequestRecord

_GROUP_ROWS: Final = 4000
"""Rows from which a transaction takes no further batch."""
_TICK: Final = 0.5
"""Seconds between engine news, and between looks at the clock when idle."""
_MAINTAIN_EVERY: Final = 30.0
_LISTEN_EVERY: Final = 10.0
_logger = logging.getLogger(__name__)


class Busy(RuntimeError):
    """As many exports are being worked on as are allowed."""


class Audience(Protocol):
    """Who hears of requests, engines and actions; called on the writer thread, must not block."""

    def requests(self, records: Sequence[RequestRecord]) -> None:
        """Requests that were just stored."""

    def engine(self, engine: Engine) -> None:
        """An engine that sent something."""

    def incident(self, incident: Incident) -> None:
        """An incident about which somebody did something."""


class CommitListener(Protocol):
    """What takes notice of each commit; called on the writer thread."""

    def process(
        self,
        records: Sequence[tuple[int, RequestRecord]],
        ended: Sequence[tuple[str, float]] = (),
        engines: Iterable[EngineInfo] = (),
        deferrals: Sequence[RequestRecord] = (),
        scrapes: Sequence[Scrape] = (),
    ) -> None:
        """Take what one commit made durable."""

    def listen(self, heard_before: float) -> Sequence[str]:
        """End engines of which nothing was heard since then (Unix seconds); returns them."""

    def flush(self) -> None:
        """Keep what :meth:`process` put off."""


_Item = tuple[Batch, "Future[None]"]


class Writer:
    """Owns the store's write side from :meth:`start` to :meth:`stop`."""

    def __init__(
        self,
        store: Store,
        detection: CommitListener,
        audience: Audience,
        metrics: SelfMetrics,
        capacity: int,
        gone_after: float = math.inf,
    ) -> None:
        """``gone_after`` is the seconds of silence after which an engine counts as gone."""
        self._store = store
        self._detection = detection
        self._audience = audience
        self._metrics = metrics
        self._queue: queue.Queue[_Item | None] = queue.Queue()
        self._capacity = capacity
        self._working = 0
        self._working_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvlens-writer", daemon=True)
        self._touched: set[str] = set()
        self._acted_on: set[str] = set()
        self._next_news = 0.0
        self._next_maintenance = 0.0
        self._gone_after = gone_after
        # Not before: what was said while this dashboard was down, nobody heard.
        self._next_listening = time.monotonic() + gone_after
        metrics.queue.set_function(lambda: self._working)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, keep the detectors' state, end the thread."""
        self._queue.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Place of one export from its parsing until it is durable; raises :class:`Busy`."""
        with self._working_lock:
            if self._working >= self._capacity:
                raise Busy
            self._working += 1
        try:
            yield
        finally:
            with self._working_lock:
                self._working -= 1

    @property
    def full(self) -> bool:
        """Whether :meth:`slot` would raise now."""
        return self._working >= self._capacity

    def submit(self, batch: Batch) -> Future[None]:
        """Queue a batch, inside a :meth:`slot`; the future is done when it is durable.

        The future raises :class:`StoreError` if the batch could not be stored.
        """
        future: Future[None] = Future()
        self._queue.put((batch, future))
        return future

    def _run(self) -> None:
        running = True
        while running:
            group: list[_Item] = []
            running = self._collect(group)
            if group:
                self._commit(group)
            try:
                self._housekeeping(idle=not group, last=not running)
            except Exception:
                self._metrics.errors.inc()
                _logger.exception("housekeeping failed, ingest goes on")

    def _collect(self, group: list[_Item]) -> bool:
        """Wait for a batch and take those behind it; False at the end."""
        rows, wait = 0, True
        while rows < _GROUP_ROWS:
            try:
                item = self._queue.get(timeout=_TICK) if wait else self._queue.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            wait = False
            # False: the sender hung up and will send it again.
            if item[1].set_running_or_notify_cancel():
                group.append(item)
                rows += len(item[0].rows)
        return True

    def _commit(self, group: list[_Item]) -> None:
        try:
            appended = self._store.append([batch for batch, _ in group])
        except Exception as error:
            if len(group) > 1:  # one bad batch must not fail the others
                for item in group:
                    self._commit([item])
                return
            self._metrics.errors.inc()
            _logger.exception("a batch was not stored")
            group[0][1].set_exception(StoreError(f"the batch was not stored: {error}"))
            return
        for _, future in group:
            future.set_result(None)
        self._metrics.records.inc(len(appended.records))
        self._metrics.duplicates.inc(appended.duplicates)
        self._touched |= appended.touched
        self._detect(group, appended)
        self._audience.requests([record for _, record in appended.records])
        self._acted_on.update(appended.acted_on)

    def _detect(self, group: list[_Item], appended: Appended) -> None:
        engines = {info.incarnation_id: info for batch, _ in group for info, _ in batch.engines}
        try:
            self._detection.process(
                appended.records,
                appended.ended,
                engines.values(),
                [record for batch, _ in group for record in batch.deferrals],
                [scrape for batch, _ in group for scrape in batch.scrapes],
            )
        except Exception:
            self._metrics.errors.inc()
            _logger.exception("incidents were not kept, will try again with the next batch")

    def _housekeeping(self, *, idle: bool, last: bool) -> None:
        now = time.monotonic()
        if idle or last:
            self._detection.flush()
        while self._acted_on:
            if (incident := self._store.incident(self._acted_on.pop())) is not None:
                self._audience.incident(incident)
        if now >= self._next_listening and not last:
            self._next_listening = now + min(_LISTEN_EVERY, self._gone_after)
            self._touched.update(self._detection.listen(time.time() - self._gone_after))
        if now >= self._next_news or last:
            self._next_news = now + _TICK
            for incarnation in self._touched:
                engine = self._store.engine(incarnation)
                if engine is not None:
                    self._audience.engine(engine)
            self._touched.clear()
        if now >= self._next_maintenance and not last:
            upkeep = self._store.maintain(time.time())
            self._metrics.deleted.inc(upkeep.deleted)
            if upkeep.size is not None:
                self._metrics.store_bytes.set(upkeep.size)
            self._next_maintenance = now if upkeep.more else now + _MAINTAIN_EVERY
