"""How a record's JSON lies in the store: as it came, deflated when that is smaller.

The first byte tells which (``{`` or zlib's ``x``), so either can be read forever.
"""

from __future__ import annotations

import zlib
from typing import Final

_SMALL: Final = 256
"""Below this many bytes deflate gains nothing."""


def pack(text: str) -> bytes:
    """Pack JSON text for the store (about a third of its size for a usual record)."""
    raw = text.strip().encode()
    return zlib.compress(raw, 1) if len(raw) > _SMALL else raw


def unpack(body: bytes) -> bytes:
    """Give back the JSON that :func:`pack` took."""
    return zlib.decompress(body) if body[:1] == b"x" else body
