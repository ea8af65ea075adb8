"""Bytes of a flight-recorder file: a header, then frames that prove themselves.

All integers are little endian::

    header   magic "KVLENSFR" | format u16 | file number u32 | length u32 | crc32 u32 | JSON
    frame    kind u8 | length u32 | crc32 u32 | JSON

The header's JSON is the EngineInfo, a frame's is a RequestRecord (kinds
REQUEST and DEFERRAL) or a :class:`Gap` or :class:`Stopped`. The checksum
covers kind, length and JSON, so that a frame that was cut off or overwritten
never passes for a record. Files are only ever appended to.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

import msgspec

from kvlens.telemetry import records
from kvlens.telemetry.records import EngineInfo, RequestRecord

MAGIC: Final = b"KVLENSFR"
FORMAT_VERSION: Final = 1
SUFFIX: Final = ".kvlens"
"""End of the files' names."""
MAX_FRAME: Final = 16 * 1024 * 1024
"""Bytes of JSON in one frame; a longer one is taken for damage."""

REQUEST: Final = 1
DEFERRAL: Final = 2
GAP: Final = 3
STOPPED: Final = 4
KINDS: Final = frozenset({REQUEST, DEFERRAL, GAP, STOPPED})

HEADER: Final = struct.Struct("<8sHIII")
FRAME: Final = struct.Struct("<BII")


class Gap(msgspec.Struct, kw_only=True):
    """Records that are not here although their requests finished here."""

    unremarkable: int = 0
    """Left out on purpose: nothing remarkable was near them."""
    dropped: int = 0
    """Lost: the file could not be written in time."""


class Stopped(msgspec.Struct, kw_only=True):
    """The engine shut down in order; no frame follows."""

    time: float


def header(engine: EngineInfo, number: int) -> bytes:
    """First bytes of an engine's file ``number`` (from 0)."""
    body = records.encode(engine).encode()
    start = HEADER.pack(MAGIC, FORMAT_VERSION, number, len(body), 0)
    return HEADER.pack(MAGIC, FORMAT_VERSION, number, len(body), header_crc(start, body)) + body


def header_crc(start: bytes, body: bytes) -> int:
    """Checksum of a header; its own field, the last one, is left out."""
    return crc32(body, crc32(start[:-4]))


def frame(kind: int, body: bytes) -> bytes:
    """One frame."""
    return FRAME.pack(kind, len(body), frame_crc(kind, body)) + body


def frame_crc(kind: int, body: bytes) -> int:
    """Checksum of a frame."""
    return crc32(body, crc32(struct.pack("<BI", kind, len(body))))


def record_frame(kind: int, record: RequestRecord, limit: int) -> bytes:
    """A record's frame; detail is dropped from a record of over ``limit`` bytes."""
    return frame(kind, records.encode_bounded(record, limit).encode())


def note_frame(note: Gap | Stopped) -> bytes:
    """A frame that is no record."""
    return frame(GAP if isinstance(note, Gap) else STOPPED, msgspec.json.encode(note))
