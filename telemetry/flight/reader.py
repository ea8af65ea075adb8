"""Reads flight-recorder files, whole or cut off anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from kvlens.telemetry import records
from kvlens.telemetry.flight import format as fmt
from kvlens.telemetry.records import EngineInfo, RecordError, RequestRecord

T = TypeVar("T")
_gap = msgspec.json.Decoder(fmt.Gap)
_stopped = msgspec.json.Decoder(fmt.Stopped)


class FlightFileError(ValueError):
    """A file that cannot be read as a recording; the message names it and says why."""


@dataclass(frozen=True)
class Entry:
    """One record of a file."""

    record: RequestRecord
    in_flight: bool = False
    """The request was still waiting for a deferred lookup."""


class FlightFile:
    """One file: the engine at once, the records by iterating.

    What iterating finds out beside the records is in the attributes once it
    has ended. A file may be read while the engine still writes it.
    """

    def __init__(self, path: Path) -> None:
        """Read the header; raises :class:`FlightFileError`."""
        self.path = path
        self.unremarkable = 0
        """Requests left out on purpose."""
        self.dropped = 0
        """Records that the recorder could not write."""
        self.stopped_at: float | None = None
        """When the engine shut down in order, Unix seconds; None if the file does not say."""
        self.damage: str | None = None
        """What is wrong with the end of the file, None if it ends with a complete record."""
        with _opened(path) as file:
            self.engine, self.number = self._header(file)
            self._start = file.tell()

    def __iter__(self) -> Iterator[Entry]:
        """Yield all complete records; raises :class:`FlightFileError` for a newer schema."""
        self.unremarkable, self.dropped = 0, 0
        self.stopped_at = self.damage = None
        with _opened(self.path) as file:
            size = file.seek(0, 2)
            file.seek(self._start)
            while (at := file.tell()) < size:
                frame = _frame(file)
                if isinstance(frame, str):
                    self.damage = f"the last {size - at:,} bytes, from byte {at:,} on: {frame}"
                    return
                if (entry := self._entry(*frame)) is not None:
                    yield entry

    def _header(self, file: BinaryIO) -> tuple[EngineInfo, int]:
        start = file.read(fmt.HEADER.size)
        if start[: len(fmt.MAGIC)] != fmt.MAGIC:
            raise FlightFileError(
                f"{self.path}: not a kvlens flight-recorder file"
                + ("" if start else ": it is empty")
            )
        if len(start) < fmt.HEADER.size:
            raise FlightFileError(f"{self.path}: cut off inside its header; it holds no record")
        _, version, number, length, crc = fmt.HEADER.unpack(start)
        if version != fmt.FORMAT_VERSION:
            raise FlightFileError(
                f"{self.path}: format version {version}; this kvlens reads version "
                f"{fmt.FORMAT_VERSION}. Read it with the kvlens that wrote it, or upgrade this one"
            )
        body = file.read(min(length, fmt.MAX_FRAME))
        if len(body) < length:
            raise FlightFileError(f"{self.path}: cut off inside its header; it holds no record")
        if fmt.header_crc(start, body) != crc:
            raise FlightFileError(f"{self.path}: its header is damaged (checksum mismatch)")
        return self._decoded(records.decode_engine, body), number

    def _entry(self, kind: int, body: bytes) -> Entry | None:
        if kind in (fmt.REQUEST, fmt.DEFERRAL):
            record = self._decoded(records.decode_record, body)
            return Entry(record, in_flight=kind == fmt.DEFERRAL)
        if kind == fmt.GAP:
            gap = self._decoded(_gap.decode, body)
            self.unremarkable += gap.unremarkable
            self.dropped += gap.dropped
        else:
            self.stopped_at = self._decoded(_stopped.decode, body).time
        return None

    def _decoded(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return decode(body)
        except (RecordError, msgspec.DecodeError, RecursionError) as error:
            raise FlightFileError(f"{self.path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open for reading; whatever the system refuses, then or later, names the file."""
    try:
        if path.exists() and not path.is_file():
            raise FlightFileError(f"{path}: not a regular file")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise FlightFileError(f"{path}: cannot be read: {error.strerror or error}") from error


_CUT_OFF = "a record that was not written to its end (killed meanwhile, or being written now)"
_DAMAGED = "overwritten or damaged (checksum mismatch)"


def _frame(file: BinaryIO) -> tuple[int, bytes] | str:
    """Kind and JSON of the next frame; if what follows is none, what it is instead."""
    start = file.read(fmt.FRAME.size)
    if len(start) < fmt.FRAME.size:
        return _CUT_OFF
    kind, length, crc = fmt.FRAME.unpack(start)
    if kind not in fmt.KINDS or length > fmt.MAX_FRAME:
        return _DAMAGED
    body = file.read(length)
    if len(body) < length:
        return _CUT_OFF
    return (kind, body) if fmt.frame_crc(kind, body) == crc else _DAMAGED
