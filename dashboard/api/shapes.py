"""JSON as the API gives it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import Response

_STATUSES: Final = {
    400: "The body cannot be read",
    403: "Asked for by a page of another site",
    404: "There is no such thing",
    409: "It is closed",
    411: "The body has no Content-Length",
    413: "The body is too large",
    415: "Neither OTLP protobuf nor JSON, or an encoding other than gzip",
    429: "The queue is full: again after Retry-After seconds",
    503: "The store does not answer",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route answers besides 200 and 422, for the API's description."""
    return {status: {"description": _STATUSES[status]} for status in statuses}


class JSON(Response):
    """A response from anything that msgspec encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode ``content``."""
        return msgspec.json.encode(content)
