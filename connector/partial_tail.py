"""Boundaries inside a block: the partial last block that some layouts store.

Where a recurrent group's block is larger than a hash, vLLM (0.28 and newer) also
stores the block in which a prompt ends, under the hash of its last tokens: every
group's block, attention's and state alike. A request that shares those tokens can
then be served up to there. It needs the complete chunks of attention below that
block, but no state at the start of it.

vLLM looks for one only next to the last boundary of complete chunks. This looks
wherever attention is complete below, so that a state that is missing there does
not hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import make_offload_key

from kvlens.connector.boundary import HIT, MISS, Search


class PartialTails:
    """The partial last blocks of one scheduler; only for layouts that have them."""

    def __init__(self, scheduler: Any) -> None:
        """Read the layout: one block size, one block per chunk, nothing windowed."""
        config = scheduler.config
        self._hash = config.tokens_per_hash
        self._block = config.kv_group_configs[0].tokens_per_chunk
        # States are the rarer: they decide first whether the rest is asked.
        self._groups = sorted(
            config.kv_group_configs, key=lambda group: not group.requires_cow_source
        )
        self._positions = {g.group_idx: i for i, g in enumerate(config.kv_group_configs)}
        # 0.33: a drafter group's key lies this far beyond, the volatile rest included.
        # 0.34: unless hashes look ahead, and nothing is volatile.
        margins: dict[int, int] = getattr(scheduler, "_eagle_proof_margins", {})
        self._margins = {} if getattr(scheduler, "use_lookahead_block_hashes", False) else margins

    def keys(self, request: Any, boundary: int) -> Iterator[tuple[Any, int, bytes]]:
        """Group, tokens that its key stands for, and that key, for a tail up to ``boundary``."""
        for group in self._groups:
            tokens = boundary + self._margins.get(group.group_idx, 0)
            block_hash = request.block_hashes[tokens // self._hash - 1]
            yield group, tokens, make_offload_key(block_hash, group.group_idx)

    def best(self, status: Any, search: Search, boundary: int, cap: int | None) -> int | None:
        """Largest tail boundary above ``boundary``, else ``boundary``; None to wait for one."""
        request, local = status.req, status.num_locally_computed_tokens
        hashed = len(request.block_hashes) * self._hash
        top = min(request.num_prompt_tokens - 1, hashed - max(self._margins.values(), default=0))
        if cap is not None:
            top = min(top, local + cap)
        if top <= boundary:
            return boundary
        top = min(top, (search.attention_end(top) + 1) * self._block - 1)
        wait = False
        for tail in range(top - top % self._hash, boundary, -self._hash):
            if tail % self._block == 0:
                continue  # a complete boundary, and known not to be one that can be served
            found = self._found(request, search, tail)
            if found and not wait:
                return tail
            # Ask on while waiting: a manager that locates chunks in the background learns of all.
            wait = wait or found is None
        return None if wait else boundary

    def _found(self, request: Any, search: Search, tail: int) -> bool | None:
        """Whether every group's block of ``tail`` is there; None if some are awaited."""
        sure = search.attention_certain(tail // self._block)
        for group, tokens, key in self.keys(request, tail):
            if tokens % self._block:
                answer = search.ask(key)
            else:  # a drafter group's, which is a complete chunk's
                answer = search.ask_chunk(
                    self._positions[group.group_idx], tokens // self._block - 1
                )
            if answer is MISS:
                return False
            sure = sure and answer is HIT
        return True if sure else None
