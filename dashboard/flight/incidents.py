"""Incidents of a recording, as a dashboard would have opened them while it happened."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvlens.dashboard.detect.base import Detector
from kvlens.dashboard.detect.panel import Observed, Panel
from kvlens.dashboard.flight.recordings import Recording
from kvlens.dashboard.model.incident import Incident
from kvlens.telemetry.flight.reader import Entry
from kvlens.telemetry.records import EngineInfo


class _Event(NamedTuple):
    """Something that a dashboard would have been told."""

    time: float
    engine: EngineInfo
    entry: Entry | None
    """None: the engine ended."""


def replay_incidents(
    recordings: Sequence[Recording],
    detectors: Sequence[Detector],
    each: Callable[[Entry, EngineInfo], None],
) -> list[Incident]:
    """Incidents as they stood at the end, in the order in which they opened.

    All engines are gone through in one order of time; ``each`` is given every
    record on the way, so that files of any size are read once and not kept.
    """
    panel = Panel(detectors)
    engines = {recording.engine.incarnation_id: recording.engine for recording in recordings}
    events = (_events(recording, _replaced_at(recording, recordings)) for recording in recordings)
    for event in heapq.merge(*events, key=lambda event: event.time):
        if event.entry is None:
            panel.end(event.engine.incarnation_id, event.time)
        else:
            each(event.entry, event.engine)
            panel.observe([Observed(event.entry.record, event.entry.in_flight)], engines.get)
    return sorted(panel.changed.values(), key=lambda incident: (incident.opened_at, incident.id))


def _replaced_at(recording: Recording, recordings: Sequence[Recording]) -> float | None:
    """Start of the next life of the same engine: one that was killed never says that it ends."""

    def place(engine: EngineInfo) -> tuple[str, int, str]:
        return engine.engine_id, engine.dp_rank, engine.host

    own = recording.engine
    later = [
        other.engine.started_at
        for other in recordings
        if place(other.engine) == place(own) and other.engine.started_at > own.started_at
    ]
    return min(later, default=None)


def _events(recording: Recording, replaced_at: float | None) -> Iterator[_Event]:
    for entry in recording:
        yield _Event(entry.record.finish_time, recording.engine, entry)
    ended_at = recording.stopped_at if recording.stopped_at is not None else replaced_at
    if ended_at is not None:
        yield _Event(ended_at, recording.engine, None)
