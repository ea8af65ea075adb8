"""Which requests somebody asks for, and what is found."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from kvlens.telemetry.records import RequestRecord

Sort = Literal["newest", "oldest", "lost", "served", "expected"]
"""By finish time, or by tokens, most first: then without those that have none."""


class RequestQuery(msgspec.Struct, kw_only=True, frozen=True):
    """Filters, all of which must hold; None = no filter."""

    since: float | None = None
    """Finish time at least, Unix seconds."""
    until: float | None = None
    """Finish time at most."""
    engine: str | None = None
    """Incarnation id or engine id."""
    verdicts: tuple[str, ...] = ()
    cause: str | None = None
    model: str | None = None
    min_lost_tokens: int = 0
    min_expected_tokens: int = 0
    max_served_tokens: int | None = None
    sort: Sort = "newest"
    limit: int = 100
    cursor: str | None = None


class FoundRequests(NamedTuple):
    """Requests in the wanted order, and where the next page starts."""

    records: list[RequestRecord]
    next_cursor: str | None
