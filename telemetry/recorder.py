"""Bounded queue between the scheduler thread and the drain thread.

``append`` is all that runs on the scheduler thread. The drain thread polls:
waking it from the scheduler thread would cost more than the fact itself. It
offers the GIL after every fact, so that the scheduler never waits for a batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

from kvlens.telemetry import facts
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.assembly.interface import InterfaceAssembler
from kvlens.telemetry.guard import Guard
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Depth
from kvlens.telemetry.sinks import MetricSink, RecordSink

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
CLOSE_SECONDS = 5.0
LAST_DRAIN_SECONDS = 2.0
"""Of the time to close, what facts may take that still wait; the sinks have the rest."""


class Recorder:
    """Takes facts from the scheduler thread, turns them into records on its own."""

    def __init__(
        self,
        info: EngineInfo,
        metrics: MetricSink,
        sinks: Sequence[RecordSink] = (),
        queue_size: int = 131_072,
        sample_rate: float = 1.0,
        wall_offset_ns: int | None = None,
    ) -> None:
        """``wall_offset_ns`` makes facts' times Unix times; by default the clocks' own offset."""
        self._queue: deque[tuple[Any, ...]] = deque()
        self._limit = queue_size
        self._sinks = sinks
        self._guard = Guard(metrics)
        assembler = InterfaceAssembler if info.depth == Depth.INTERFACE else Assembler
        self._assembler = assembler(
            info, metrics, sinks, sample_rate, wall_offset_ns, guard=self._guard
        )
        self._stop = Event()
        self._thread = Thread(target=self._run, name="kvlens-drain", daemon=True)

    def append(self, fact: tuple[Any, ...]) -> None:
        """Take one fact; called on the scheduler thread, never raises, never waits."""
        self._queue.append(fact)
        if len(self._queue) > self._limit:
            self._overflow()

    def start(self) -> None:
        """Start the drain thread."""
        self._thread.start()

    def close(self) -> None:
        """Drain what is there, emit what is open and close the sinks, within 5 s."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_SECONDS)

    @property
    def waiting(self) -> int:
        """Facts that wait for the drain thread now."""
        return len(self._queue)

    def drain(self, until: float | None = None) -> int:
        """Handle all facts that are there now; returns how many. Drain thread (and tests) only.

        What comes meanwhile waits for the next round: under a load that is too high
        for this thread, requests would otherwise never be emitted. At ``until``
        (``time.monotonic()``), if given, the rest is left.
        """
        handled = 0
        queue = self._queue
        for _ in range(len(queue)):
            if until is not None and time.monotonic() >= until:
                break
            try:
                fact = queue.popleft()
            except IndexError:  # an overflow on the scheduler thread was faster
                break
            self._guard(self._assembler.handle, fact)
            handled += 1
            time.sleep(0)
        return handled

    def poll(self, now_ns: int) -> None:
        """Drain, and emit what is settled at ``now_ns``. Drain thread (and simulations) only."""
        self.drain()
        self._guard(self._assembler.tick, now_ns)

    def flush(self, until: float | None = None) -> None:
        """Drain, and emit every finished request without waiting for its last stores."""
        self.drain(until)
        self._guard(self._assembler.flush)

    def _overflow(self) -> None:
        """Drop the oldest eighth, and say in its place what was lost."""
        dropped, state_lost = 0, False
        for _ in range(max(1, self._limit // 8)):
            try:
                fact = self._queue.popleft()
            except IndexError:  # the drain thread was faster
                break
            if fact[0] == facts.LOST:
                dropped += fact[2]
                state_lost |= fact[3]
            else:
                dropped += 1
                state_lost |= fact[0] in facts.STATE_KINDS
        self._queue.appendleft((facts.LOST, time.monotonic_ns(), dropped, state_lost))

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.poll(time.monotonic_ns())
        self.flush(time.monotonic() + LAST_DRAIN_SECONDS)
        if left := len(self._queue):
            logger.warning("kvlens: facts that waited when the engine stopped were left: %d", left)
        for sink in self._sinks:
            self._guard(sink.close)
