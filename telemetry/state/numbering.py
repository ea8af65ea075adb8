"""Numbers for the blocks of prompts, so that a recording can be sized without any hash.

A prompt's blocks are numbered in the order in which an engine first saw them, prefix by
prefix, as published traces do it: equal numbers mean equal prefixes on this engine, and nothing
else can be read from them. A prompt whose start is known and whose rest is new is two ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvlens.telemetry import facts
from kvlens.telemetry.records import Layout, Range

LEAST_TOKENS: Final = 64
"""A numbered block has at least so many tokens, in whole chunks."""
MAX_BLOCKS: Final = 262_144
"""Blocks remembered, those used longest ago are forgotten first; some 30 MB."""
MAX_RANGES: Final = 256
"""Ranges of one prompt; what lies behind is left out."""
_KEY_BYTES: Final = 8


class Numbering:
    """Numbers one engine's blocks; belongs to the drain thread."""

    def __init__(self, layout: Layout, limit: int = MAX_BLOCKS) -> None:
        # The finest chunks of a kind that is kept whole say most about a prompt.
        groups = sorted(
            range(len(layout.groups)),
            key=lambda index: (
                layout.groups[index].group_kind != "full_attention",
                layout.groups[index].tokens_per_chunk,
            ),
        )
        self.group = groups[0] if groups else None
        """Index of the group whose chunks are numbered."""
        chunk = layout.groups[groups[0]].tokens_per_chunk if groups else 1
        self._stride = max(1, -(-LEAST_TOKENS // chunk))
        self.block_tokens = self._stride * chunk
        self._limit = limit
        self._numbers: dict[int, int] = {}
        self._next = 0

    def of(self, added: facts.Added, finished: facts.Finished) -> list[Range]:
        """Numbers of a finished request's prompt."""
        if self.group is None or self.group >= len(finished.keys):
            return []
        keys, length = finished.keys[self.group]
        return self.blocks(keys, length, added.prompt_tokens)

    def blocks(self, keys: Sequence[bytes], length: int, prompt_tokens: int) -> list[Range]:
        """Numbers of a prompt's complete blocks, as ranges.

        ``keys``, up to ``length``, are those of its chunks in order. They are
        prefix-chained: the last chunk of a block stands for all before it.
        """
        stride = self._stride
        end = min(length, prompt_tokens // self.block_tokens * stride)
        marks = [
            int.from_bytes(keys[at][:_KEY_BYTES], "big") for at in range(stride - 1, end, stride)
        ]
        known = self._numbers
        numbers = [known.pop(mark, -1) for mark in marks]
        for index, number in enumerate(numbers):
            if number < 0:
                numbers[index] = self._next
                self._next += 1
        # The prompt's start is put back last, to be forgotten last.
        known.update(zip(reversed(marks), reversed(numbers), strict=True))
        if (excess := len(known) - self._limit) > 0:
            for mark in list(islice(known, excess + self._limit // 64)):
                del known[mark]
        return _ranges(numbers)


def _ranges(numbers: Sequence[int]) -> list[Range]:
    ranges: list[Range] = []
    for number in numbers:
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1] = (ranges[-1][0], number)
        elif len(ranges) == MAX_RANGES:
            break
        else:
            ranges.append((number, number))
    return ranges
