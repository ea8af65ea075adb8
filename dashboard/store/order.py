"""How pages of requests are sorted, and the position after one of their rows."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvlens.dashboard.model.query import Sort

Key = tuple[float, ...]
"""Where a row stands: ``(value?, finish_time, row)``, unique; the row and the value are whole."""
_BOUND: Final = 2**63


class Order(NamedTuple):
    """One way to sort; ties go by finish time, then by row."""

    value: str | None = None
    """Sorted by this column first; only rows where it is above 0 have a place."""
    descending: bool = True

    def columns(self, row: str) -> list[str]:
        """Columns of the key; ``row`` is the store's name of the last one."""
        return [*([self.value] if self.value else []), "finish_time", row]

    def clause(self, row: str) -> str:
        """What follows ORDER BY."""
        direction = "DESC" if self.descending else "ASC"
        return ", ".join(f"{name} {direction}" for name in self.columns(row))

    @property
    def beyond(self) -> str:
        """Operator between a later row's key and the position."""
        return "<" if self.descending else ">"

    def cursor(self, key: Key) -> str:
        """Opaque position after the row with this key; it names the order it belongs to."""
        *value, time, row = key
        wholes = [str(int(number)) for number in value]
        return "_".join([*self._name, *wholes, float(time).hex(), str(int(row))])

    def position(self, cursor: str) -> Key:
        """Read what :meth:`cursor` made; raises ``ValueError`` for anything else."""
        given = cursor.split("_")
        parts = given[len(self._name) :]
        try:
            *value, time, row = parts
            wholes = [int(text) for text in (*value, row)]
            key = (*wholes[:-1], float.fromhex(time), wholes[-1])
            known = len(value) == (self.value is not None) and self.cursor(key) == cursor
            if not known or not all(-_BOUND < number < _BOUND for number in key):
                raise ValueError(cursor)
        except (ValueError, OverflowError) as error:
            raise ValueError(
                "not a cursor of this API in this sort order: pass next_cursor of a page as it is"
            ) from error
        return key

    @property
    def _name(self) -> list[str]:
        if self.value:
            return [self.value.removesuffix("_tokens")]
        return [] if self.descending else ["oldest"]


ORDERS: Final[dict[Sort, Order]] = {
    "newest": Order(),
    "oldest": Order(descending=False),
    "lost": Order("lost_tokens"),
    "served": Order("served_tokens"),
    "expected": Order("expected_tokens"),
}
