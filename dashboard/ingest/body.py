"""Reading a request body within limits: as sent and after gzip."""

from __future__ import annotations

import zlib
from typing import Final

from starlette.requests import ClientDisconnect, Request

GZIP: Final = "gzip"
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_MAX_MEMBERS: Final = 64


class BodyError(ValueError):
    """A body that is refused; ``status`` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read(request: Request, limit: int) -> bytes:
    """Read the body as sent, at most ``limit`` bytes; raises :class:`BodyError`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit, "")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit, "")
            parts.append(part)
    except ClientDisconnect as error:
        raise BodyError(400, "the connection was closed before the end of the body") from error
    return b"".join(parts)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a ``Content-Encoding``; raises :class:`BodyError` before ``limit`` bytes are passed."""
    if encoding in ("", "identity"):
        return body
    if encoding != GZIP:
        raise BodyError(415, f"Content-Encoding {encoding!r} is not supported: use gzip or none")
    parts: list[bytes] = []
    size = 0
    while body:  # gzip allows several members in a row
        if len(parts) >= _MAX_MEMBERS:  # each copies the rest: time that no size bounds
            raise BodyError(400, f"the gzip body has over {_MAX_MEMBERS} members")
        member = zlib.decompressobj(_GZIP_WINDOW)
        try:
            part = member.decompress(body, limit - size + 1)
        except zlib.error as error:
            raise BodyError(400, f"the body is not gzip: {error}") from error
        size += len(part)
        if size > limit:
            raise _too_large(limit, " after decompression")
        if not member.eof:
            raise BodyError(400, "the gzip body is cut off")
        parts.append(part)
        body = member.unused_data
    return b"".join(parts)


def _too_large(limit: int, when: str) -> BodyError:
    return BodyError(
        413,
        f"the body is larger than {limit:,} bytes{when}: send smaller batches or raise "
        f"KVLENS_MAX_{'DECOMPRESSED' if when else 'BODY'}_BYTES of the dashboard",
    )
