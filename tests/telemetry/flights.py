"""Recorders on real folders, and records to feed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recording import engine

from kvlens.telemetry.flight.files import FlightFiles
from kvlens.telemetry.flight.reader import Entry, FlightFile
from kvlens.telemetry.flight.recorder import FlightRecorder, Mode
from kvlens.telemetry.records import RequestRecord

MIB = 1024 * 1024


def record(number: int, verdict: str = "full", **changes: Any) -> RequestRecord:
    """Request ``number`` of the default engine, finished a second after the one before."""
    values: dict[str, Any] = {
        "request_id": f"r{number}", "internal_request_id": f"r{number}-0123abcd",
        "engine_id": "engine-0", "incarnation_id": "first", "model": "tiny",
        "arrival_time": 1000.0 + number, "finish_time": 1000.5 + number, "prompt_tokens": 130,
        "verdict": verdict,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


def recorder(folder: Path, mode: Mode = Mode.ALWAYS, **changes: Any) -> FlightRecorder:
    """A recorder of the default engine."""
    context = changes.pop("context", 16)
    max_bytes = changes.pop("max_bytes", 8 * MIB)
    return FlightRecorder(FlightFiles(folder, engine(**changes), max_bytes), mode, context)


def files(folder: Path) -> list[FlightFile]:
    """All recordings, oldest first."""
    return [FlightFile(path) for path in sorted(folder.glob("*.kvlens"))]


def entries(folder: Path) -> list[Entry]:
    """All records of all files, in order."""
    return [entry for file in files(folder) for entry in file]


def ids(folder: Path) -> list[str]:
    """Ids of all records, in order."""
    return [entry.record.request_id for entry in entries(folder)]
