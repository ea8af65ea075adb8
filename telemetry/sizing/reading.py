"""Opens traces: the format is found by content, every line is checked, nothing is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from kvlens.telemetry.flight import format as flight_format
from kvlens.telemetry.sizing import packed
from kvlens.telemetry.sizing.formats import FieldError, LineFormat, mooncake, qwen
from kvlens.telemetry.sizing.recorded import Records, flight
from kvlens.telemetry.sizing.trace import TraceError, TraceRequest

_EXPORT: Final = frozenset({"incarnation_id", "prompt_tokens", "verdict"})
_QWEN: Final = frozenset({"chat_id", "parent_chat_id"})
_MOONCAKE: Final = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
_SHOWN: Final = (
    "mooncake, qwen-bailian, a flight recording or an export of requests (docs/sizing.md)"
)
EXPORT, FLIGHT = "export", "flight-recording"


class Trace:
    """A trace that is read by iterating, once; what it is is known after the first request."""

    def __init__(self, path: Path, block_tokens: int | None = None) -> None:
        """``block_tokens`` overrides what the format says. Raises :class:`TraceError`."""
        self.path = path
        self.format = ""
        self.block_tokens = block_tokens or 0
        self.chained_here = False
        """Whether the ids were not chained in the trace."""
        self.notes: list[str] = []
        """What the trace lacks; complete once all was read."""
        self._given = block_tokens
        self._records = Records()

    @property
    def engines(self) -> int:
        """Engines that recorded it, 1 for public traces; known once all was read."""
        return max(1, self._records.engines)

    def __iter__(self) -> Iterator[TraceRequest]:
        """All requests in order; raises :class:`TraceError` at the first line that is wrong."""
        requests = self._flight() if self._is_flight() else self._lines()
        count = 0
        for request in requests:
            self.block_tokens = self.block_tokens or self._records.block_tokens
            count += 1
            yield request
        if left_out := self._records.left_out:
            if not count:
                raise TraceError(
                    f"{self.path}: no request names its blocks (prefix_blocks): they are shorter "
                    f"than a block, or an older kvlens recorded them; record anew with this one"
                )
            self.notes.append(f"{left_out:,} requests name no block: too short, or cut to fit")
        if not count:
            raise TraceError(f"{self.path}: holds no request")

    def _is_flight(self) -> bool:
        try:
            with self.path.open("rb") as file:
                return file.read(len(flight_format.MAGIC)) == flight_format.MAGIC
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _flight(self) -> Iterator[TraceRequest]:
        self.format = FLIGHT
        self._no_override()
        return flight(self.path, self._records, self.notes)

    def _no_override(self) -> None:
        if self._given:
            raise TraceError(
                f"{self.path}: --block-tokens: {self._given}; a recording says itself how many "
                f"tokens a block has"
            )

    def _lines(self) -> Iterator[TraceRequest]:
        numbered = packed.lines(self.path)
        first = next(numbered, None)
        if first is None:
            return iter(())
        try:
            self.format = _format_of(first[1])
        except FieldError as error:
            raise TraceError(f"{self.path}:{first[0]}: {error}") from None
        whole = chain([first], numbered)
        if self.format == EXPORT:
            self._no_override()
            return self._exported(whole)
        self.chained_here = self.format == "qwen-bailian"
        known = qwen() if self.chained_here else mooncake()
        self.block_tokens = self._given or known.block_tokens
        return self._arriving(whole, known)

    def _exported(self, numbered: Iterable[tuple[int, bytes]]) -> Iterator[TraceRequest]:
        """An export may be in any order, newest first by default: blocks only, then sorted."""
        found: list[tuple[float, TraceRequest]] = []
        for number, line in numbered:
            try:
                recorded = self._records.line(line)
            except FieldError as error:
                raise self._wrong(number, line, error) from None
            if recorded is not None:
                found.append(recorded)
        found.sort(key=itemgetter(0))
        return (request for _, request in found)

    def _arriving(
        self, numbered: Iterable[tuple[int, bytes]], known: LineFormat
    ) -> Iterator[TraceRequest]:
        latest = 0.0
        for number, line in numbered:
            try:
                if known.name == "mooncake" and b'"chat_id"' in line:
                    raise FieldError("chat_id: unknown here; allowed: the fields of mooncake")
                request = self._checked(known, line)
                if request.time < latest:
                    raise FieldError(
                        f"timestamp: {request.time:g} s after {latest:g} s, time goes back; "
                        f"allowed: lines in the order of their arrival"
                    )
            except FieldError as error:
                raise self._wrong(number, line, error) from None
            latest = request.time
            yield request

    def _checked(self, known: LineFormat, line: bytes) -> TraceRequest:
        request, size = known.read(line), self.block_tokens
        blocks, given = request.tokens / size, len(request.ids)
        if not request.tokens // size <= given < blocks + 1:
            raise FieldError(
                f"hash_ids: {given:,} ids for {request.tokens:,} tokens (input_length) at {size} "
                f"a block; allowed: {-(-request.tokens // size):,}, or --block-tokens for another "
                f"size"
            )
        return request

    def _wrong(self, number: int, line: bytes, error: FieldError) -> TraceError:
        """The error of a line; if it is of another format than the first, that."""
        where = f"{self.path}:{number}"
        try:
            other = _format_of(line)
        except FieldError:
            other = self.format
        if other == self.format:
            return TraceError(f"{where}: {error}")
        return TraceError(
            f"{where}: mixed formats: this line is {other}, the lines before are {self.format}; "
            f"allowed: one format in a file"
        )


def _format_of(line: bytes) -> str:
    """Name of a line's format; raises :class:`FieldError` for one that is none of them."""
    if line.startswith((packed.GZIP, packed.ZSTD)) or b"\0" in line[:1024]:
        raise FieldError(f"not a trace, but binary data; allowed: {_SHOWN}, plain, gzip or zstd")
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except msgspec.ValidationError:
        raise FieldError(f"no JSON object; allowed: one object a line, in {_SHOWN}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FieldError(f"not valid JSON: {error}; allowed: {_SHOWN}") from None
    if fields >= _EXPORT:
        return EXPORT
    if fields & _QWEN:
        return "qwen-bailian"
    if fields & _MOONCAKE:
        return "mooncake"
    named = ", ".join(sorted(fields)[:8]) or "no field"
    raise FieldError(f"unknown format with {named:.200}; allowed: {_SHOWN}")
