"""One request of a trace, as every format comes to it, and what is wrong with a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_ID: Final = 2**63 - 1
"""Largest block id."""
MAX_TOKENS: Final = 2**31 - 1
"""Most tokens of a request."""


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, line, field and what is allowed."""


class TraceRequest(NamedTuple):
    """One request."""

    time: float
    """Arrival in seconds; only differences mean something."""
    tokens: int
    """Of the prompt."""
    output_tokens: int
    ids: Sequence[int]
    """Its complete blocks in order and, where the trace has it, the last incomplete one."""
    session: int | None = None
    """What turns of one conversation share; None where the trace does not say."""
    engine: int = 0
    """Which engine served it, from 0: recordings say it."""
