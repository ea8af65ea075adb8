"""Recordings on disk, made by the real flight recorder from the factory's records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvlens.telemetry.flight.files import FlightFiles
from kvlens.telemetry.flight.recorder import FlightRecorder, Mode
from kvlens.telemetry.records import EngineInfo, RequestRecord


def fly(
    folder: Path,
    info: EngineInfo,
    records: Iterable[RequestRecord],
    waiting: Iterable[RequestRecord] = (),
    mode: Mode = Mode.ALWAYS,
) -> Path:
    """Record ``records``, then the deferrals ``waiting``; returns the newest file."""
    recorder = FlightRecorder(FlightFiles(folder, info, 8 * 1024 * 1024), mode, context=1)
    for record in records:
        recorder.request(record)
    for record in waiting:
        recorder.deferral(record)
    recorder.close()
    return max(folder.glob("*.kvlens"), key=lambda path: path.stat().st_mtime_ns)
