"""Bytes of a file that may be packed with gzip or zstd, told by their first bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvlens.telemetry.sizing.trace import TraceError

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
MAX_LINE: Final = 64 * 1024 * 1024
"""Longest line, in bytes."""
_READ: Final = 8192
"""Bytes read at a time: what they unpack to is held at once, so that it stays bounded."""


def chunks(path: Path) -> Iterator[bytes]:
    """The file's content, unpacked; raises :class:`TraceError` if it is cut off or damaged."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP):
                yield from _unpacked(path, file, "gzip")
            elif magic == ZSTD:
                yield from _unpacked(path, file, "zstd")
            else:
                while chunk := file.read(1 << 18):
                    yield chunk
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines from 1, without their ends; blank ones are left out."""
    number, rest = 0, b""
    for chunk in chunks(path):
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for line in parts:
            number += 1
            if line and not line.isspace():
                yield number, line
        if len(rest) > MAX_LINE:
            raise TraceError(
                f"{path}:{number + 1}: longer than {MAX_LINE:,} bytes; a trace has one request "
                f"a line"
            )
    if rest and not rest.isspace():
        yield number + 1, rest


def _unpacked(path: Path, file: BinaryIO, kind: str) -> Iterator[bytes]:
    unpacker, begun = _unpacker(path, kind), False
    while data := file.read(_READ):
        while data:
            try:
                out = unpacker.decompress(data)
            except Exception as error:  # each library has one of its own
                raise TraceError(f"{path}: damaged {kind} data: {error}") from error
            begun, data = True, b""
            if out:
                yield out
            if unpacker.eof:  # another member may follow
                data, begun = unpacker.unused_data, False
                unpacker = _unpacker(path, kind)
    if begun:
        raise TraceError(
            f"{path}: cut off: its {kind} data has no end; copy or download the file again"
        )


def _unpacker(path: Path, kind: str) -> Any:
    if kind == "gzip":
        return zlib.decompressobj(wbits=31)
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise TraceError(
            f"{path}: packed with zstd, which needs the package zstandard: "
            f"pip install zstandard, or unpack the file (zstd -d)"
        ) from error
    return zstandard.ZstdDecompressor().decompressobj()
