"""The hit ratio of every tier size at once, from what each block needs."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from kvlens.telemetry.sizing.stack import Run

SHARES: Final = (0.90, 0.95, 0.99)
"""Shares of the ceiling whose sizes are told."""


class Point(NamedTuple):
    """What a tier of ``blocks`` serves; ratios of all blocks and of all prompt tokens."""

    blocks: int
    block_ratio: float
    token_ratio: float


class Reach(NamedTuple):
    """The smallest tier that serves ``share`` of what an endless one serves, in blocks."""

    share: float
    blocks: int


class Needs:
    """How many blocks and tokens each tier size is the first to serve."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._blocks = array("q", [0]) * 1024
        self._tokens = array("q", [0]) * 1024

    def add(self, runs: Sequence[Run], tokens: int) -> None:
        """Count what was found of a prompt of ``tokens``; its last block may be incomplete."""
        size = self._size
        for start, end, need, step in runs:
            if step:
                self._ramp(start, end, need, tokens)
                continue
            if need >= len(self._blocks):
                self._grow(need)
            self._blocks[need] += end - start
            self._tokens[need] += min(end * size, tokens) - min(start * size, tokens)

    def _ramp(self, start: int, end: int, need: int, tokens: int) -> None:
        if need + end - start >= len(self._blocks):
            self._grow(need + end - start)
        for block in range(start, end):
            at = need + block - start
            self._blocks[at] += 1
            self._tokens[at] += max(0, min(self._size, tokens - block * self._size))

    def _grow(self, need: int) -> None:
        more = array("q", [0]) * max(need + 1 - len(self._blocks), len(self._blocks))
        self._blocks.extend(more)
        self._tokens.extend(more)

    def sums(self) -> Sums:
        """All sizes, once the trace has ended."""
        return Sums(array("q", accumulate(self._blocks)), array("q", accumulate(self._tokens)))


class Sums:
    """Blocks and tokens served, by size of the tier in blocks."""

    def __init__(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        self._blocks = blocks
        self._tokens = tokens

    def blocks(self, size: int) -> int:
        """Blocks that a tier of ``size`` blocks serves."""
        return self._blocks[min(size, len(self._blocks) - 1)]

    def tokens(self, size: int) -> int:
        """Prompt tokens that it serves."""
        return self._tokens[min(size, len(self._tokens) - 1)]

    @property
    def largest(self) -> int:
        """The smallest size beyond which nothing more is served; 0 if nothing ever is."""
        return bisect_left(self._blocks, self._blocks[-1])

    def reach(self, share: float, beside: int = 0) -> int:
        """Smallest size that serves ``share`` of all that is served beyond a size of ``beside``."""
        least = self.blocks(beside)
        return bisect_left(self._blocks, least + share * (self._blocks[-1] - least))


def steps(largest: int) -> list[int]:
    """Sizes to show by default: 1, 2, 5, 10, ... over at most four powers of ten."""
    found: list[int] = []
    power = 1
    while not found or found[-1] < largest:
        found += [power, 2 * power, 5 * power]
        power *= 10
    while len(found) > 3 and found[-2] >= largest:
        found.pop()
    return [size for size in found if size * 20_000 >= largest]
