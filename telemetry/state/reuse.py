"""How large the tier should be: ghosts of evicted chunks, and reuse distances.

A **ghost** is a chunk that was evicted and is offered again, which says that
it had to be computed again. Its distance, in chunks evicted meanwhile, is how
much larger the tier would have had to be (an upper bound: in a larger tier
some of those would not have come back either).

A **reuse distance** is the number of distinct chunks used between two uses of
the same one: a tier that evicts the least recently used serves the second use
if it holds more chunks than that. Counting it over all chunks would cost a
tree; here a uniform sample of chunks is followed, chosen by hash, and
distances are scaled up (SHARDS, Waldspurger et al., FAST '15). A use is a load
or an offer of a chunk: what the GPU cache answers never reaches the tier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from typing import Final
from zlib import crc32

from kvlens.telemetry.semconv import CAPACITY_MULTIPLES

MAX_GHOSTS: Final = 262_144
MAX_SAMPLED: Final = 8_192
FURTHEST: Final = 2 * max(CAPACITY_MULTIPLES)
"""Uses further apart than this many capacities count as first uses."""
MEMORY: Final = 50_000
"""Uses after which the past counts half in the hit ratio."""
_HASHES: Final = 2**32


class Ghosts:
    """Chunks that were evicted, and when."""

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        self._limit = limit
        self._evictions = 0
        self._when: dict[bytes, int] = {}

    def evicted(self, keys: Iterable[bytes]) -> None:
        """Note evicted chunks; beyond the limit the oldest are forgotten."""
        when = self._when
        for key in keys:
            self._evictions += 1
            when.pop(key, None)
            when[key] = self._evictions
        excess = len(when) - self._limit
        if excess > 0:
            # In batches, since each deletion at the front of a dict leaves a hole to step over.
            for key in list(islice(when, excess + self._limit // 64)):
                del when[key]

    def returned(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """Those of ``keys`` that were evicted, each with the evictions since; forgets them."""
        when, now = self._when, self._evictions
        if not when:
            return []
        return [(key, now - when.pop(key)) for key in keys if key in when]

    def clear(self) -> None:
        """Forget all: the tier was emptied on purpose."""
        self._when.clear()


class ReuseDistances:
    """Distances between uses of sampled chunks, and the hit ratio that follows."""

    def __init__(self, capacity: int, max_sampled: int = MAX_SAMPLED) -> None:
        """``capacity`` of the tier in chunks."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, got {capacity}")
        self.rate = min(1.0, max_sampled / (FURTHEST * capacity))
        """Share of chunks that is followed."""
        self._threshold = int(self.rate * _HASHES)
        self._limit = max_sampled
        self._limits = [int(multiple * capacity) for multiple in CAPACITY_MULTIPLES]
        self._hits = [0.0] * len(self._limits)
        self._uses = 0.0
        self._clock = 0
        # Both in the order of last use: the position of a key's time is its rank.
        self._last: dict[bytes, int] = {}
        self._times: list[int] = []

    def used(self, keys: Iterable[bytes]) -> list[int]:
        """Note uses; returns the distances of those that were used before, in chunks."""
        threshold = self._threshold
        return [
            distance
            for key in keys
            if crc32(key) < threshold and (distance := self._use(key)) is not None
        ]

    def hit_ratios(self) -> list[float] | None:
        """Per entry of ``CAPACITY_MULTIPLES``, the share of uses that would be hits."""
        return [hits / self._uses for hits in self._hits] if self._uses else None

    def _use(self, key: bytes) -> int | None:
        last, times = self._last, self._times
        self._clock += 1
        self._uses += 1
        before = last.pop(key, None)
        distance = None
        if before is not None:
            rank = bisect_left(times, before)
            distance = int((len(times) - rank - 1) / self.rate)
            del times[rank]
            for index, limit in enumerate(self._limits):
                self._hits[index] += distance < limit
        elif len(times) >= self._limit:
            del last[next(iter(last))]
            del times[0]
        last[key] = self._clock
        times.append(self._clock)
        if self._uses >= 2 * MEMORY:
            self._uses /= 2
            self._hits = [hits / 2 for hits in self._hits]
        return distance
