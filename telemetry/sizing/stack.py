"""Exact LRU stack distances of whole requests, O(log n) for each run of blocks.

The stack distance of a block is its rank by last touch, the newest being 1 (Mattson et
al., 1970): an LRU tier holds it if it has room for that many blocks. A request touches its blocks
in a row, so that the stack is a sequence of *slots*, one per request, and a tree over slots
(Fenwick, 1994) with the rank within a slot gives the distance. A request that shares a
prefix with an earlier one finds that prefix in one piece, hence one question for all of it.

A request looks its whole prefix up first and touches its blocks after. So a block is served
by tiers that hold it and all before it: what it needs is the largest distance so far.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvlens.telemetry.sizing.fenwick import Fenwick
from kvlens.telemetry.sizing.last_touch import NEVER, LastTouch


class Order(str, Enum):
    """In which order a request touches its blocks."""

    FIRST_TO_LAST = "first-to-last"
    """The prompt's start is the oldest: of a prompt, the start is evicted first."""
    LAST_TO_FIRST = "last-to-first"
    """The prompt's end is the oldest, as in vLLM's own LRU policy."""


class Run(NamedTuple):
    """Blocks ``start`` to ``end`` - 1 of a request and the tier, in blocks, that serves them."""

    start: int
    end: int
    need: int
    """What the first of them needs."""
    step: int = 0
    """How much more each next one needs: 0 or 1."""


class _Piece(NamedTuple):
    """Touches ``first`` to ``first + length - 1`` of one slot, which end now."""

    slot: int
    first: int
    length: int


class LruStack:
    """The stack of one tier that is large enough for everything.

    Block ids are whole numbers from 0. They may be anything; where equal ids mean equal
    prefixes, requests cost least.
    """

    def __init__(self, order: Order = Order.FIRST_TO_LAST) -> None:
        self.last = LastTouch()
        self._direction = 1 if order is Order.FIRST_TO_LAST else -1
        self._begins = array("q")
        """First touch number of each slot."""
        self._stops = array("q")
        """Touch number behind the last live one of each slot."""
        self._live = array("q")
        """Touches of each slot that are the newest of their block."""
        self._weights = Fenwick()
        """The same, by which sums are asked for."""
        self._holes: dict[int, list[int]] = {}
        """By slot: touches that are not, although older ones of the slot are; ascending."""
        self._touches = 0

    def touch(self, ids: Sequence[int]) -> list[Run]:
        """Look a request's blocks up, then touch them in order; what was found of its prefix."""
        touched = self.last.get(ids)
        runs: list[Run] = []
        pieces: list[_Piece] = []
        at, need, count, whole = 0, 0, len(ids), True
        while at < count:
            if touched[at] == NEVER:
                at, whole = at + 1, False
                continue
            piece = self._piece(touched, at)
            if whole:
                need = self._found(runs, at, piece, need)
            pieces.append(piece)
            at += piece.length
        if len(set(ids)) == count:
            for piece in pieces:
                self._end(piece)
            self._push(ids, touched.count(NEVER))
        else:
            self._touch_repeated(ids, touched)
        return runs

    def _piece(self, touched: Sequence[int], at: int) -> _Piece:
        """The longest run of consecutive touches of one slot from ``at`` on."""
        first, way = touched[at], self._direction
        slot = bisect_right(self._begins, first) - 1
        room = self._stops[slot] - first if way > 0 else first - self._begins[slot] + 1
        stop = min(len(touched), at + room)
        end, ahead = at + 1, first + way
        while end < stop and touched[end] == ahead:
            end += 1
            ahead += way
        return _Piece(slot, first if way > 0 else ahead + 1, end - at)

    def _found(self, runs: list[Run], at: int, piece: _Piece, need: int) -> int:
        """Note what a piece of the prefix needs; returns what the blocks behind it need at least.

        First to last, the first block of a piece lies deepest; last to first, each
        next one lies one deeper.
        """
        slot, first, length = piece
        deepest = self._weights.after(slot) + self._above(slot, first)
        if self._direction > 0:
            need = max(need, deepest)
            runs.append(Run(at, at + length, need))
            return need
        level = min(length, max(0, need - (deepest - length)))
        if level:
            runs.append(Run(at, at + level, need))
        if level < length:
            runs.append(Run(at + level, at + length, deepest - length + level + 1, 1))
        return max(need, deepest)

    def _above(self, slot: int, touch: int) -> int:
        """Live touches of a slot from ``touch`` on."""
        above = self._stops[slot] - touch
        holes = self._holes.get(slot)
        return above - (len(holes) - bisect_left(holes, touch)) if holes else above

    def _end(self, piece: _Piece) -> None:
        """These touches are not the newest of their blocks any more."""
        slot, first, length = piece
        self._live[slot] -= length
        self._weights.add(slot, -length)
        if not self._live[slot]:
            self._holes.pop(slot, None)
        elif first + length == self._stops[slot]:
            holes, stop = self._holes.get(slot, []), first
            while holes and holes[-1] == stop - 1:
                stop = holes.pop()
            self._stops[slot] = stop
        elif self._live[slot] > self._above(slot, first) - length:  # something older is live
            holes = self._holes.setdefault(slot, [])
            for touch in range(first, first + length):
                insort(holes, touch)

    def _push(self, ids: Sequence[int], new: int) -> None:
        """A new slot for ``ids``, all live."""
        self.last.set(ids[:: self._direction], self._touches, new)
        self._begins.append(self._touches)
        self._live.append(len(ids))
        self._stops.append(self._touches + len(ids))
        self._weights.append(len(ids))
        self._touches += len(ids)

    def _touch_repeated(self, ids: Sequence[int], touched: Sequence[int]) -> None:
        """A request that holds a block twice: only its last touch counts."""
        for touch in {one for one in touched if one != NEVER}:
            self._end(_Piece(bisect_right(self._begins, touch) - 1, touch, 1))
        fresh = {one for one, touch in zip(ids, touched, strict=True) if touch == NEVER}
        first = self._touches
        self._push(ids, len(fresh))
        slot, newest = len(self._begins) - 1, self.last.get(ids[:: self._direction])
        for touch, now in enumerate(newest, first):
            if touch != now:
                self._end(_Piece(slot, touch, 1))
