"""Axes of the picture: where values lie, and which of them are written down."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from kvlens.dashboard.sizing.report import Sized

_NICE = (1, 2, 5)


@dataclass(frozen=True)
class Sizes:
    """The axis of tier sizes: logarithmic, in GiB where known, else in blocks."""

    low: float
    high: float
    left: float
    right: float
    per_block: float
    """Units of the axis in a block."""
    gib: bool

    @classmethod
    def of(cls, sized: Sized, left: float, right: float) -> Sizes:
        """From where nothing is to be seen yet to where nothing more is to be had."""
        sums, per_block = sized.said.sums, sized.per_block
        gib = sized.memory.bytes_per_token is not None
        largest = max(1, sums.largest)
        smallest = max(1.0, largest / 3000, sums.reach(0.2) / 10, sized.said.gpu_blocks / 3)
        if sized.now is not None:
            smallest = max(1.0, min(smallest, 0.8 * sized.now))
        high = max(4 * smallest, 1.15 * largest, 1.15 * (sized.now or 0))
        return cls(smallest * per_block, high * per_block, left, right, per_block, gib)

    def x(self, blocks: float) -> float:
        """Where a size of so many blocks lies."""
        value = min(max(blocks * self.per_block, self.low), self.high)
        share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.left + share * (self.right - self.left)

    def samples(self, count: int) -> list[int]:
        """Sizes in blocks, evenly spaced on the axis."""
        low, high = log10(self.low / self.per_block), log10(self.high / self.per_block)
        sizes = (round(10 ** (low + (high - low) * at / count)) for at in range(count + 1))
        return sorted({max(1, size) for size in sizes})

    def ticks(self, most: int) -> list[float]:
        """Round values, in units of the axis: at most so many."""
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in (_NICE, (1,)):
            found = [n * 10.0**power for power in powers for n in steps]
            if self.gib:  # from 1 TiB on in TiB
                found = [v for v in found if v < 1000] + [1024 * v for v in found if v >= 1]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) <= most:
                break
        return found[:: -(-len(found) // most)] if found else [self.low]

    def at(self, value: float) -> float:
        """Where a value in units of the axis lies."""
        return self.x(value / self.per_block)


def ratio_steps(top: float) -> list[float]:
    """Round shares from 0 to just above ``top``."""
    step = next(
        s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 1) if top / s <= 5
    )
    return [step * number for number in range(ceil(min(1.0, 1.05 * top) / step - 1e-9) + 1)]
