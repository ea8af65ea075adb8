"""When each block was touched last: eight bytes a block where ids are dense."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

NEVER: Final = -1
_START: Final = 4096
_SPARSE: Final = 4
"""A table may be so many times as long as there are blocks in it."""


class LastTouch:
    """Maps block ids (0 to 2**63 - 1) to touch numbers.

    Published traces number their blocks from 0: those ids index a table. Ids that are
    far larger than there are blocks go into a dictionary, at some hundred bytes each.
    """

    def __init__(self) -> None:
        self._table = array("q", [NEVER]) * _START
        self._sparse: dict[int, int] = {}
        self.blocks = 0
        """Distinct ids seen."""

    def get(self, ids: Sequence[int]) -> list[int]:
        """Touch number of each id, ``NEVER`` where there is none."""
        table, sparse = self._table, self._sparse
        try:
            return [table[one] for one in ids]
        except IndexError:
            size = len(table)
            return [table[one] if one < size else sparse.get(one, NEVER) for one in ids]

    def set(self, ids: Sequence[int], first: int, new: int) -> None:
        """Number the touches of ``ids`` from ``first`` on; ``new`` ids were never seen before."""
        self.blocks += new
        if ids and new and (largest := max(ids)) >= len(self._table):
            self._grow(largest + 1)
        table, size = self._table, len(self._table)
        try:
            for number, one in enumerate(ids, first):
                table[one] = number
        except IndexError:
            for number, one in enumerate(ids, first):
                if one < size:
                    table[one] = number
                else:
                    self._sparse[one] = number

    def known(self, one: int) -> bool:
        """Whether ``one`` was touched."""
        if one < len(self._table):
            return self._table[one] != NEVER
        return one in self._sparse

    def _grow(self, wanted: int) -> None:
        size = len(self._table)
        most = max(_START, _SPARSE * self.blocks)
        wanted = max(wanted, min(2 * size, most))
        if wanted > most:
            return
        self._table.extend(array("q", [NEVER]) * (wanted - size))
        moved = [one for one in self._sparse if one < wanted]
        for one in moved:
            self._table[one] = self._sparse.pop(one)
