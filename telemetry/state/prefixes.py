"""What this engine has computed before, by block hash: what any connector could have kept.

The public connector interface tells which prompt came and what was matched, not
what is stored. vLLM chains block hashes, so that one hash stands for a whole
prefix: if an earlier request computed it, its KV data existed here. Hashes are cut
to eight bytes; two prefixes that share them are one in 10^19.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import gcd, lcm
from typing import Final

from kvlens.telemetry.records import Layout

MAX_PREFIXES: Final = 262_144
"""Boundaries remembered; the least recently used is forgotten, and then not expected."""
_HASH_BYTES: Final = 8
_SURE_HASHES: Final = 8
"""Hashes of a request from which its tokens per hash are certain."""


class KnownPrefixes:
    """Boundaries up to which KV data was computed; belongs to the drain thread."""

    def __init__(
        self,
        layout: Layout,
        computations: int = 1,
        limit: int = MAX_PREFIXES,
    ) -> None:
        """Follow boundaries at which every group of ``layout`` has a whole chunk.

        Args:
            layout: the groups; their annotated ``drafter`` flags count.
            computations: how often a prefix must have been computed before it is
                expected (vLLM's ``store_threshold``).
            limit: boundaries that are remembered.
        """
        sizes = [group.tokens_per_chunk for group in layout.groups]
        self.unit: int = lcm(*sizes)
        """Tokens between two boundaries that count."""
        self._full = all(group.full_attention for group in layout.groups)
        self._recurrent = any(group.recurrent for group in layout.groups)
        self._popped = max((g.tokens_per_chunk for g in layout.groups if g.pop), default=0)
        """Tokens beyond a boundary that drafter groups must hold too: their chunk to pop."""
        self._finest = gcd(*(group.tokens_per_block for group in layout.groups))
        self._needed = max(1, computations)
        self._limit = limit
        self._tokens_per_hash: int | None = None
        self._times: OrderedDict[bytes, int] = OrderedDict()
        self._ends: OrderedDict[bytes, None] = OrderedDict()
        """Where earlier prompts ended, which is where states and windows are kept."""
        self._proofs: OrderedDict[bytes, None] = OrderedDict()
        """Ends of the drafter chunks that follow a boundary."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def computed(self, hashes: Sequence[bytes], tokens: int, num_tokens: int) -> None:
        """The first ``tokens`` of a request with these hashes were computed."""
        names = self._names(hashes, num_tokens)[: tokens // self.unit]
        for name in names:
            self._times[name] = self._times.pop(name, 0) + 1
            self._evicted.pop(name, None)
        for last in self._last_boundaries(tokens):
            if 0 < last <= len(names):
                _touch(self._ends, names[last - 1])
        for name in self._proof_names(hashes, num_tokens)[: (tokens - self._popped) // self.unit]:
            _touch(self._proofs, name)
        for known in (self._times, self._ends, self._proofs, self._evicted):
            while len(known) > self._limit:
                known.popitem(last=False)

    def evicted(self, block_hash: bytes) -> None:
        """The tier gave up a chunk that ends with this hash."""
        name = block_hash[:_HASH_BYTES]
        if name in self._times:
            self._evicted[name] = None

    def reset(self) -> None:
        """The tier was emptied."""
        self._times.clear()
        self._ends.clear()
        self._proofs.clear()
        self._evicted.clear()

    def expected(self, hashes: Sequence[bytes], local: int, num_tokens: int) -> tuple[int, int]:
        """``(kept, computed)``: tokens beyond ``local`` that were computed before.

        Of ``kept`` no eviction is known. Where a group is not full attention only the
        end of an earlier prompt counts, since states are kept nowhere else for certain,
        and the last token is computed again. A drafter group gives up one boundary.
        """
        names = self._names(hashes, num_tokens)
        proofs = self._proof_names(hashes, num_tokens)
        kept = self._boundary(names, proofs, num_tokens, spare_evicted=False)
        computed = self._boundary(names, proofs, num_tokens, spare_evicted=True)
        return max(0, kept - local), max(0, computed - local)

    def seen(self, hashes: Sequence[bytes], num_tokens: int) -> bool:
        """Whether any whole chunk of the request was computed before."""
        return any(name in self._times for name in self._names(hashes, num_tokens)[:1])

    def _boundary(
        self, names: list[bytes], proofs: list[bytes], num_tokens: int, spare_evicted: bool
    ) -> int:
        count = 0
        for name in names:
            if self._times.get(name, 0) < self._needed:
                break
            if name in self._evicted and not spare_evicted:
                break
            count += 1
        if not self._full:
            count = min(count, (num_tokens - 1) // self.unit)
        while count and not self._ends_load(count, names, proofs):
            count -= 1
        return count * self.unit

    def _ends_load(self, count: int, names: list[bytes], proofs: list[bytes]) -> bool:
        """Whether a load may end after ``count`` units, as far as can be known."""
        if not self._full and names[count - 1] not in self._ends:
            return False
        if not self._popped:
            return True
        return count <= len(proofs) and proofs[count - 1] in self._proofs

    def _last_boundaries(self, tokens: int) -> set[int]:
        """Units at which a prompt of ``tokens`` leaves what a load that ends there needs.

        A recurrent state is kept at the last boundary before the last token; windows, in
        addition, where a drafter group has a chunk to give up.
        """
        last = max(0, tokens - 1) // self.unit
        if self._recurrent or not self._popped:
            return {last}
        return {last, max(0, tokens - self._popped) // self.unit}

    def _names(self, hashes: Sequence[bytes], num_tokens: int, beyond: int = 0) -> list[bytes]:
        """Names of the prefixes of one, two, ... units, and ``beyond`` tokens more."""
        per_hash = self._tokens_per_hash or self._guess(len(hashes), num_tokens)
        if per_hash is None or self.unit % per_hash or beyond % per_hash:
            return []
        first = (self.unit + beyond) // per_hash - 1
        return [bytes(name[:_HASH_BYTES]) for name in hashes[first :: self.unit // per_hash]]

    def _proof_names(self, hashes: Sequence[bytes], num_tokens: int) -> list[bytes]:
        return self._names(hashes, num_tokens, self._popped) if self._popped else []

    def _guess(self, hashes: int, num_tokens: int) -> int | None:
        """Tokens of one hash: the largest divisor of all blocks that makes so many of them.

        With lookahead hashes the last block has none until its successor is known.
        """
        if not hashes:
            return None
        for size in range(self._finest, 0, -1):
            if self._finest % size == 0 and hashes in (
                num_tokens // size,
                (num_tokens - 1) // size,
            ):
                if hashes >= _SURE_HASHES:
                    self._tokens_per_hash = size
                return size
        return None


def _touch(known: OrderedDict[bytes, None], name: bytes) -> None:
    known.pop(name, None)
    known[name] = None
