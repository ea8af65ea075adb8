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
    found: dict[str, Incident] = {}
    events = [(record.finish_time, 0, record) for record in waiting]
    events += [(record.finish_time, 1, record) for record in finished]
    for _, ended, record in sorted(events, key=itemgetter(0, 1)):
        for detector in detectors:
            tell = detector.observe if ended else detector.deferred
            if (incident := tell(record, engine)) is not None:
                found[incident.id] = incident
    return sorted(found.values(), key=lambda incident: (incident.opened_at, incident.id))
