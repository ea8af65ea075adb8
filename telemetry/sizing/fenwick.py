"""Sums over the end of a growing sequence, in O(log n) per change and per question."""

from __future__ import annotations

from array import array


class Fenwick:
    """A binary indexed tree (Fenwick, 1994) that is appended to; indexes count from 0."""

    def __init__(self) -> None:
        self._tree = array("q", [0])
        self.total = 0
        """Sum of all values."""

    def append(self, value: int) -> None:
        """Add an element at the end."""
        tree = self._tree
        index = len(tree)
        stop, child, held = index - (index & -index), index - 1, value
        while child > stop:
            held += tree[child]
            child -= child & -child
        tree.append(held)
        self.total += value

    def add(self, index: int, change: int) -> None:
        """Change the element at ``index``."""
        tree, at, size = self._tree, index + 1, len(self._tree)
        while at < size:
            tree[at] += change
            at += at & -at
        self.total += change

    def after(self, index: int) -> int:
        """Sum of the elements behind ``index``."""
        tree, at, before = self._tree, index + 1, 0
        while at:
            before += tree[at]
            at -= at & -at
        return self.total - before
