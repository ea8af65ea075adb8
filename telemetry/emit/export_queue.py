"""A span processor that outlives its receiver.

OpenTelemetry's batch processor gives a batch up after one failed export and
logs each failure. Here a batch that could not be sent is kept and retried with
growing pauses; the queue is bounded, drops the oldest and counts them; a
receiver that is away costs one log line.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Event, Thread, current_thread

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvlens.telemetry.emit.otlp import THREAD_NAME, hush

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.3
MAX_BATCH = 256
MAX_PAUSE_SECONDS = 15.0
HEARTBEAT_SECONDS = 60.0


class ExportQueue(SpanProcessor):
    """Bounded queue in front of an exporter, with one thread of its own."""

    def __init__(self, exporter: SpanExporter, receiver: str, max_spans: int) -> None:
        self._exporter = exporter
        self._receiver = receiver
        self._max = max_spans
        self._queue: deque[ReadableSpan] = deque()
        self._wake = Event()
        self._closed = False
        self._away = False
        self._heartbeat: Callable[[], None] | None = None
        self._beat_every = HEARTBEAT_SECONDS
        self._beat_at = 0.0
        self.dropped = 0
        hush()
        self._thread = Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do: only ended spans are sent."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span; drops the oldest when full."""
        self._queue.append(span)
        while len(self._queue) > self._max:
            try:
                self._queue.popleft()
            except IndexError:
                return
            self.dropped += 1

    def beat(self, heartbeat: Callable[[], None], after: float = HEARTBEAT_SECONDS) -> None:
        """Call ``heartbeat`` every ``after`` seconds while the receiver takes spans.

        It is called on the sender's thread, and may end spans.
        """
        self._beat_every = after
        self._beat_at = time.monotonic() + after
        self._heartbeat = heartbeat

    def still(self) -> None:
        """No further heartbeat."""
        self._heartbeat = None

    def shutdown(self) -> None:
        """One last attempt to send what is left, at most two seconds."""
        self._closed = True
        self._wake.set()
        if current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wake the sender; returns whether the queue is empty."""
        self._wake.set()
        return not self._queue

    def _run(self) -> None:
        pause = FLUSH_SECONDS
        while not self._closed:
            self._wake.wait(pause)
            self._wake.clear()
            self._beat()
            pause = FLUSH_SECONDS if self._send_all() else min(pause * 2, MAX_PAUSE_SECONDS)
        self._send_all()
        self.dropped += len(self._queue)
        self._exporter.shutdown()

    def _beat(self) -> None:
        # Not while the receiver is away: that would only push records out of the queue.
        heartbeat = self._heartbeat
        if heartbeat is not None and not self._away and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._beat_every
            heartbeat()

    def _send_all(self) -> bool:
        while self._queue:
            count = min(len(self._queue), MAX_BATCH)
            batch = [self._queue.popleft() for _ in range(count)]
            if not self._send(batch):
                self._queue.extendleft(reversed(batch))
                return False
        return True

    def _send(self, batch: list[ReadableSpan]) -> bool:
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - an exporter must not end this thread
            logger.debug("kvlens: export failed: %s", error)
            sent = False
        if sent and self._away:
            logger.info("kvlens: %s takes spans again, %d dropped", self._receiver, self.dropped)
        elif not sent and not self._away:
            logger.warning(
                "kvlens: %s does not take spans; the newest %d are kept and retried, serving is "
                "not affected",
                self._receiver,
                self._max,
            )
        self._away = not sent
        return sent
