"""Runs the detectors over what became durable, in order, on the writer thread.

The store keeps the detectors' states with a checkpoint. What was committed
after it is read again at the next start, so a crash between a commit and its
detection loses nothing and reports nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, ParamSpec

from kvlens.dashboard.detect.base import Detector, Incident
from kvlens.dashboard.detect.zero_hit import ZeroHit, ZeroHitConfig
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.records import EngineInfo, RequestRecord

_REPLAY: Final = 1000
"""Records read at once after a restart."""
_SAVE_EVERY: Final = 5000
"""Records without a changed incident after which states are saved anyway."""
_logger = logging.getLogger(__name__)
P = ParamSpec("P")


def default_detectors(settings: Settings) -> list[Detector]:
    """All detectors with the thresholds of ``settings``."""
    return [
        ZeroHit(
            ZeroHitConfig(
                min_tokens=settings.eligible_min_tokens,
                min_requests=settings.zero_hit_requests,
                window=settings.zero_hit_window_seconds,
                accident=settings.zero_hit_accident,
                recovery=settings.zero_hit_recovery,
            )
        )
    ]


class Detection:
    """Feeds detectors and keeps what they find."""

    def __init__(
        self,
        detectors: Sequence[Detector],
        store: Store,
        publish: Callable[[Incident], None],
        failed: Callable[[], None],
    ) -> None:
        """``publish`` gets each change once it is kept; ``failed`` counts errors of ours."""
        self._detectors = detectors
        self._store = store
        self._publish = publish
        self._failed = failed
        self._checkpoint = 0
        self._unsaved = 0
        self._engines: dict[str, EngineInfo] = {}
        self._ended: dict[str, float] = {}
        self._dirty: set[str] = set()
        self._changed: dict[str, Incident] = {}

    def restore(self) -> None:
        """Go on where the last process stopped; call before the first :meth:`process`."""
        saved = self._store.load_detection()
        self._checkpoint = saved.checkpoint
        by_kind = {str(detector.kind): detector for detector in self._detectors}
        for kind, incarnation, state in saved.states:
            if kind in by_kind:
                self._guard(by_kind[kind].load, incarnation, state)
        engines = self._store.engines()
        self._engines = {engine.info.incarnation_id: engine.info for engine in engines}
        while records := self._store.records_after(self._checkpoint, _REPLAY):
            self.process(records)
        self.process(
            (),
            [(e.info.incarnation_id, e.ended_at) for e in engines if e.ended_at is not None],
        )

    def process(
        self,
        records: Sequence[tuple[int, RequestRecord]],
        ended: Sequence[tuple[str, float]] = (),
        engines: Iterable[EngineInfo] = (),
    ) -> None:
        """Take what one commit made durable: ``(seq, record)`` and ended incarnations."""
        self._engines.update((info.incarnation_id, info) for info in engines)
        self._ended.update(ended)
        for record in sorted((record for _, record in records), key=_order):
            self._observe(record)
        for incarnation in self._ended.keys() & self._dirty.union(i for i, _ in ended):
            self._dirty.add(incarnation)
            for detector in self._detectors:
                self._note(self._guard(detector.end, incarnation, self._ended[incarnation]))
        self._checkpoint = max((seq for seq, _ in records), default=self._checkpoint)
        self._unsaved += len(records)
        if self._changed or self._unsaved >= _SAVE_EVERY:
            self.save()

    def flush(self) -> None:
        """Keep what :meth:`process` put off."""
        if self._unsaved or self._changed:
            self.save()

    def save(self) -> None:
        """Keep incidents, states and the checkpoint, then publish the incidents."""
        states = [
            (str(detector.kind), incarnation, detector.dump(incarnation))
            for detector in self._detectors
            for incarnation in self._dirty
        ]
        changed = list(self._changed.values())
        self._store.save_detection(self._checkpoint, changed, states)
        self._changed.clear()
        self._dirty.clear()
        self._unsaved = 0
        for incident in changed:
            self._publish(incident)

    def _observe(self, record: RequestRecord) -> None:
        engine = self._engines.get(record.incarnation_id)
        if engine is None:
            return
        self._dirty.add(record.incarnation_id)
        for detector in self._detectors:
            self._note(self._guard(detector.observe, record, engine))

    def _note(self, incident: Incident | None) -> None:
        if incident is not None:
            self._changed[incident.id] = incident

    def _guard(
        self, call: Callable[P, Incident | None], *args: P.args, **kwargs: P.kwargs
    ) -> Incident | None:
        """Contain a detector's error: records are safe and the other detectors go on."""
        try:
            return call(*args, **kwargs)
        except Exception:
            self._failed()
            _logger.exception("a detector failed; its state may miss a request")
            return None


def _order(record: RequestRecord) -> tuple[float, str]:
    return record.finish_time, record.internal_request_id
