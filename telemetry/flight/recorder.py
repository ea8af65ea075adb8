"""Keeps request records in files, so that an incident can be looked at when it is over.

The drain thread encodes and queues; a thread of its own writes, so that a disk
that hangs holds nothing up. What cannot be written is kept and retried, the
oldest is dropped beyond a bound and counted, and a file says what it lacks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec

from kvlens.telemetry import semconv
from kvlens.telemetry.flight import format as fmt
from kvlens.telemetry.flight.files import FlightFiles
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import QUIET_VERDICTS, Verdict

logger = logging.getLogger(__name__)

QUEUE_BYTES = 8 * 1024 * 1024
"""Encoded records that wait for the disk; beyond it the oldest are dropped."""
_BATCH_BYTES = 65_536
"""Encoded records written at once, about."""
RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 15.0
CLOSE_SECONDS = 2.0
UNREMARKABLE = QUIET_VERDICTS | {Verdict.SKIPPED}
"""Verdicts that are written in mode ``anomalies`` only near others."""


class Mode(str, Enum):
    """What is written."""

    ALWAYS = "always"
    """Every request."""
    ANOMALIES = "anomalies"
    """Requests that lost something, and some before and after each."""


class FlightRecorder:
    """A :class:`~kvlens.telemetry.sinks.RecordSink`; starts its thread at once.

    Args:
        files: where to write.
        mode: what to write.
        context: in mode ``anomalies``, unremarkable requests kept before and
            after each other one.
    """

    sampled = False
    dropped_metric = semconv.DROPPED_RECORDS

    def __init__(self, files: FlightFiles, mode: Mode = Mode.ALWAYS, context: int = 16) -> None:
        self.dropped = 0
        self._files = files
        self._limit = max(semconv.RECORD_MAX_BYTES, files.file_bytes // 16)
        self._always = mode is Mode.ALWAYS
        self._context = context
        self._before: deque[RequestRecord] = deque()
        self._after = 0
        """Unremarkable requests still to be written."""
        self._left_out = 0
        """Requests left out since the last one written."""
        self._lock = Lock()
        self._queue: deque[tuple[bytes, int]] = deque()
        """Frames, each with the number of records that are lost with it."""
        self._queued = 0
        self._reported = 0
        """Dropped records that a gap in the file tells of."""
        self._wake = Event()
        self._closing = Event()
        self._away = False
        self._thread = Thread(target=self._run, name="kvlens-flight-recorder", daemon=True)
        self._thread.start()

    @classmethod
    def from_settings(
        cls, info: EngineInfo, folder: str | None, mode: str, context: int, max_bytes: int
    ) -> FlightRecorder | None:
        """A recorder for the configured folder; None when none is configured."""
        if folder is None:
            return None
        path = Path(folder).expanduser().absolute()
        return cls(FlightFiles(path, info, max_bytes), Mode(mode), context)

    def request(self, record: RequestRecord) -> None:
        """Take a finished request."""
        remarkable = record.verdict not in UNREMARKABLE
        if remarkable:
            self._after = self._context
        elif not self._always:
            if not self._after:
                self._before.append(record)
                if len(self._before) > self._context:
                    self._before.popleft()
                    self._left_out += 1
                return
            self._after -= 1
        if self._left_out:
            self._put(fmt.note_frame(fmt.Gap(unremarkable=self._left_out)), 0)
            self._left_out = 0
        while self._before:
            self._put_record(fmt.REQUEST, self._before.popleft())
        self._put_record(fmt.REQUEST, record)

    def deferral(self, record: RequestRecord) -> None:
        """Take an in-flight record of a request that waits: always a remarkable one."""
        self._put_record(fmt.DEFERRAL, record)

    def close(self) -> None:
        """Say that the engine stops, and write what is left, within two seconds."""
        left_out = self._left_out + len(self._before)
        if left_out:
            self._put(fmt.note_frame(fmt.Gap(unremarkable=left_out)), 0)
        self._put(fmt.note_frame(fmt.Stopped(time=time.time())), 0)
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=CLOSE_SECONDS)

    def _put_record(self, kind: int, record: RequestRecord) -> None:
        # Nothing is sampled here, whatever share of the spans is sent.
        whole = msgspec.structs.replace(record, sampling_probability=1.0)
        self._put(fmt.record_frame(kind, whole, self._limit), 1)

    def _put(self, frame: bytes, records: int) -> None:
        with self._lock:
            self._queue.append((frame, records))
            self._queued += len(frame)
            while self._queued > QUEUE_BYTES and len(self._queue) > 1:
                old, lost = self._queue.popleft()
                self._queued -= len(old)
                self.dropped += lost
        self._wake.set()

    def _run(self) -> None:
        pause = RETRY_SECONDS
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._write_all():
                pause = RETRY_SECONDS
            else:
                self._closing.wait(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)
                self._wake.set()
        self._write_all()
        with self._lock:
            self.dropped += sum(lost for _, lost in self._queue)
            self._queue.clear()
        self._contained(self._files.close)

    def _write_all(self) -> bool:
        """Write what is queued; False if the disk does not take it."""
        while True:
            with self._lock:
                if not self._queue:
                    return True
                batch, size = [], 0
                while self._queue and size < _BATCH_BYTES:
                    batch.append(self._queue.popleft())
                    size += len(batch[-1][0])
                self._queued -= size
                missing = self.dropped - self._reported
            if not self._contained(self._write, b"".join(frame for frame, _ in batch), missing):
                with self._lock:
                    self._queue.extendleft(reversed(batch))
                    self._queued += size
                return False

    def _write(self, frames: bytes, missing: int) -> None:
        if missing:
            self._files.append(fmt.note_frame(fmt.Gap(dropped=missing)))
            self._reported += missing
        self._files.append(frames)

    def _contained(self, call: Callable[..., None], *args: object) -> bool:
        """Call; False if it raised. One log line when that begins, one when it ends."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - the thread must outlive any error of the disk
            if not self._away:
                self._away = True
                logger.warning(
                    "kvlens: the flight recorder cannot write to %s (%s); the newest records are "
                    "kept and retried, serving is not affected",
                    self._files.folder,
                    error,
                )
            return False
        if self._away:
            self._away = False
            logger.info(
                "kvlens: the flight recorder writes to %s again, %d records dropped",
                self._files.folder,
                self.dropped,
            )
        return True
