"""The detectors over the records of one engine that are all there, as after a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from kvlens.dashboard.detect.base import Detector
from kvlens.dashboard.model.incident import Incident
from kvlens.telemetry.records import EngineInfo, RequestRecord


def detect(
    engine: EngineInfo,
    finished: Sequence[RequestRecord],
    waiting: Sequence[RequestRecord],
    detectors: Sequence[Detector],
) -> list[Incident]:
    """Incidents as they stood at the end, in the order in which they opened.

    ``waiting`` are in-flight records, each as of its ``finish_time``.
    """
    watch = Watch(detectors)
    events = [(record.finish_time, 0, record) for record in waiting]
    events += [(record.finish_time, 1, record) for record in finished]
    for _, ended, record in sorted(events, key=itemgetter(0, 1)):
        (watch.observe if ended else watch.deferred)(record, engine)
    return watch.found()


class Watch:
    """The same as records come, without keeping them."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self._detectors = detectors
        self._found: dict[str, Incident] = {}

    def observe(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has finished."""
        for detector in self._detectors:
            if (incident := detector.observe(record, engine)) is not None:
                self._found[incident.id] = incident

    def deferred(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has been waiting for long, as of its ``finish_time``."""
        for detector in self._detectors:
            if (incident := detector.deferred(record, engine)) is not None:
                self._found[incident.id] = incident

    def found(self) -> list[Incident]:
        """Incidents as they stand, in the order in which they opened."""
        return sorted(self._found.values(), key=lambda one: (one.opened_at, one.id))
