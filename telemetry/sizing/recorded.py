"""Recordings and exports as traces: records whose prompts' blocks are numbered."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from kvlens.telemetry import records
from kvlens.telemetry.flight.reader import FlightFile, FlightFileError
from kvlens.telemetry.records import RecordError, RequestRecord
from kvlens.telemetry.sizing.formats import FieldError
from kvlens.telemetry.sizing.trace import TraceError, TraceRequest

_SHIFT = 40
"""Engines number their blocks on their own: each has a range of ids, too wide to be left."""


class Records:
    """Turns records into requests; all have to agree on the size of a block."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self.left_out = 0
        """Requests shorter than a block, or recorded without their blocks."""
        self._engines: dict[str, int] = {}

    @property
    def engines(self) -> int:
        """Lives of engines seen."""
        return len(self._engines)

    def request(self, record: RequestRecord) -> TraceRequest | None:
        """A record's request; None without numbered blocks. Raises :class:`FieldError`."""
        if not record.prefix_blocks:
            self.left_out += 1
            return None
        size = record.prefix_block_tokens
        if size < 1 or (self.block_tokens and size != self.block_tokens):
            raise FieldError(
                f"prefix_block_tokens: {size}; allowed: {self.block_tokens or 'from 1'}, as in the "
                f"lines before; size the engines one by one"
            )
        self.block_tokens = size
        engine = self._engines.setdefault(record.incarnation_id, len(self._engines))
        numbers = array("q")
        for first, last in record.prefix_blocks:
            if not first <= last < first + record.prompt_tokens or last >= 1 << _SHIFT:
                raise FieldError(
                    f"prefix_blocks: [{first}, {last}]; allowed: first <= last, within the prompt"
                )
            numbers.extend(range((engine << _SHIFT) + first, (engine << _SHIFT) + last + 1))
        if len(numbers) * size > record.prompt_tokens:
            raise FieldError(
                f"prefix_blocks: {len(numbers):,} blocks of {size} tokens; allowed: at most the "
                f"{record.prompt_tokens:,} tokens of prompt_tokens"
            )
        return TraceRequest(
            record.arrival_time, record.prompt_tokens, record.output_tokens, numbers, None, engine
        )

    def line(self, line: bytes) -> tuple[float, TraceRequest] | None:
        """The same from a line of an export, with the time at which it finished."""
        try:
            record = records.decode_record(line)
            request = self.request(record)
            return None if request is None else (record.finish_time, request)
        except RecordError as error:
            raise FieldError(str(error)) from None


def flight(path: Path, found: Records, notes: list[str]) -> Iterator[TraceRequest]:
    """Requests of one flight-recorder file; what it lacks goes into ``notes``."""
    try:
        file = FlightFile(path)
        for entry in file:
            if entry.in_flight:
                continue
            try:
                request = found.request(entry.record)
            except FieldError as error:
                raise TraceError(f"{path}: request {entry.record.request_id}: {error}") from None
            if request is not None:
                yield request
    except FlightFileError as error:
        raise TraceError(str(error)) from error
    if file.damage:
        notes.append(f"{path}: {file.damage}")
    if file.dropped or file.unremarkable:
        missing = file.dropped + file.unremarkable
        notes.append(
            f"{path}: {missing:,} requests are not in the recording, so that reuse looks rarer "
            f"than it was; record with flight_recorder_mode: always"
        )
