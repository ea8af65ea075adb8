"""Which of several engines a request goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import Final, Protocol

from kvlens.telemetry.sizing.stack import LruStack
from kvlens.telemetry.sizing.trace import TraceRequest

SLACK: Final = 1.25
"""Prefix-aware: an engine may have so many times its share of computed blocks (consistent hashing
with bounded loads, Mirrokni et al., SODA '18, names the idea and this value)."""


class Routing(str, Enum):
    """Ways to spread requests."""

    RANDOM = "random"
    SESSION = "session-sticky"
    PREFIX = "prefix-aware"
    RECORDED = "recorded"
    """To the engine that served it."""


class Router(Protocol):
    """Chooses an engine for each request in turn."""

    def choose(self, request: TraceRequest, stacks: Sequence[LruStack]) -> int:
        """Index of the engine; ``stacks`` have seen all requests before."""


class Recorded:
    """The engine that the trace names."""

    def choose(self, request: TraceRequest, stacks: Sequence[LruStack]) -> int:
        """Index of the engine."""
        return request.engine


class Random:
    """Any engine, by a seeded draw."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def choose(self, request: TraceRequest, stacks: Sequence[LruStack]) -> int:
        """Index of the engine."""
        return self._draw.randrange(len(stacks))


class Session:
    """The engine of the conversation's first turn, which is drawn.

    Where a trace names no sessions, a request continues the one whose complete blocks it
    begins with, if that one was the first to ask for the last of them: what others had asked
    for before is a prefix that conversations share.
    """

    def __init__(self, seed: int, block_tokens: int) -> None:
        self._draw = random.Random(seed)
        self._block_tokens = block_tokens
        self._engines: dict[int, int] = {}

    def choose(self, request: TraceRequest, stacks: Sequence[LruStack]) -> int:
        """Index of the engine."""
        engines = self._engines
        if request.session is not None:
            return engines.setdefault(request.session, self._draw.randrange(len(stacks)))
        found = next((engines[one] for one in reversed(request.ids) if one in engines), None)
        engine = self._draw.randrange(len(stacks)) if found is None else found
        complete = min(len(request.ids), request.tokens // self._block_tokens)
        last = request.ids[complete - 1] if complete else None
        if last is not None and not any(stack.last.known(last) for stack in stacks):
            engines[last] = engine
        return engine


class Prefix:
    """The engine that has seen most of the prefix, unless it has computed far over its share.

    What an engine has seen is never forgotten here, as in a router's own prefix tree. One
    that is over its share by more than :data:`SLACK` is passed over; ties go to the least loaded.
    """

    def __init__(self) -> None:
        self._computed: list[int] = []

    def choose(self, request: TraceRequest, stacks: Sequence[LruStack]) -> int:
        """Index of the engine."""
        computed = self._computed = self._computed or [0] * len(stacks)
        seen = [_prefix(stack, request.ids) for stack in stacks]
        allowed = SLACK * (sum(computed) + len(request.ids)) / len(stacks)
        free = [engine for engine, load in enumerate(computed) if load <= allowed]
        best = max(free, key=lambda engine: (seen[engine], -computed[engine]))
        computed[best] += len(request.ids) - seen[best]
        return best


def router(routing: Routing, block_tokens: int, seed: int = 0) -> Router:
    """The router of that name."""
    if routing is Routing.RECORDED:
        return Recorded()
    if routing is Routing.RANDOM:
        return Random(seed)
    return Session(seed, block_tokens) if routing is Routing.SESSION else Prefix()


def _prefix(stack: LruStack, ids: Sequence[int]) -> int:
    """Leading blocks that the stack has seen; by halves, since prefixes are seen from the start."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if stack.last.known(ids[middle]):
            low = middle + 1
        else:
            high = middle
    return low
