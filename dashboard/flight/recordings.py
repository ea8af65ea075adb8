"""Flight-recorder files, put together to one recording per life of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlens.dashboard.ingest.checks import check_engine, check_record
from kvlens.telemetry.flight.format import SUFFIX
from kvlens.telemetry.flight.reader import Entry, FlightFile, FlightFileError
from kvlens.telemetry.records import EngineInfo, RecordError


@dataclass(frozen=True)
class Recording:
    """All files of one incarnation, in order; iterating reads them."""

    engine: EngineInfo
    files: Sequence[FlightFile]

    def __iter__(self) -> Iterator[Entry]:
        """Yield all records; raises :class:`FlightFileError` for one that makes no sense."""
        for file in self.files:
            for entry in file:
                try:
                    check_record(entry.record, self.engine)
                except RecordError as error:
                    raise FlightFileError(f"{file.path}: {error}") from error
                yield entry

    @property
    def stopped_at(self) -> float | None:
        """When the engine shut down in order, Unix seconds; known once all was read."""
        return self.files[-1].stopped_at

    @property
    def unremarkable(self) -> int:
        """Requests left out on purpose; known once all was read."""
        return sum(file.unremarkable for file in self.files)

    def notes(self) -> list[str]:
        """What this recording lacks; known once all was read."""
        notes = [f"{file.path}: {file.damage}" for file in self.files if file.damage]
        if dropped := sum(file.dropped for file in self.files):
            notes.append(f"{dropped:,} records are missing: they could not be written in time")
        if first := self.files[0].number:
            notes.append(f"it begins with file {first}: older ones were deleted to keep the bound")
        for before, after in zip(self.files, self.files[1:], strict=False):
            if (absent := after.number - before.number - 1) > 0:
                notes.append(f"{absent} files before {after.path.name} are missing")
        return notes


def load(paths: Iterable[Path]) -> list[Recording]:
    """Recordings in files and folders, oldest engine first.

    Raises :class:`FlightFileError` naming what cannot be read.
    """
    by_incarnation: dict[str, list[FlightFile]] = {}
    for path in dict.fromkeys(found for given in paths for found in _files(given)):
        file = FlightFile(path)
        try:
            check_engine(file.engine)
        except RecordError as error:
            raise FlightFileError(f"{path}: {error}") from error
        by_incarnation.setdefault(file.engine.incarnation_id, []).append(file)
    recordings = []
    for files in by_incarnation.values():
        files.sort(key=lambda file: file.number)
        recordings.append(Recording(files[0].engine, files))
    return sorted(recordings, key=lambda r: (r.engine.started_at, r.engine.incarnation_id))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        found = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIX))
    except OSError as error:
        raise FlightFileError(f"{path}: cannot be read: {error.strerror}") from error
    if not found:
        raise FlightFileError(f"{path}: this folder holds no recording (no *{SUFFIX} file)")
    return found
