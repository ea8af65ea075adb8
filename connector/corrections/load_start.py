"""Defect: the first block to load is looked for from the start of the table.

At allocation vLLM scans a group's blocks for the first that is neither null nor
hashed and starts loading there. A recurrent or windowed group legitimately has
such a block below what is computed locally; the load then starts too early, or
an assertion ends the engine (#52807).

Correction: blocks below the locally computed boundary look computed.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from kvlens.connector.corrections import fakes
from kvlens.connector.corrections.switch import Switch

NAME = "load_start"
SUMMARY = "a load may start below the locally computed boundary"
FIXED_IN = "0.30.0"


class _ComputedBlock:
    """A block that is not a candidate for loading but keeps its id."""

    __slots__ = ("block_hash", "block_id", "is_null")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.is_null = True
        self.block_hash = None


def hide_computed(blocks: Any, groups: Any, local_tokens: int) -> Any:
    """``blocks`` with unhashed blocks below ``local_tokens`` marked as computed.

    Returns ``blocks`` itself when there are none, which is the usual case.
    """
    changed: dict[int, list[Any]] = {}
    for group in groups:
        table = blocks.blocks[group.group_idx]
        first_fresh = -(-local_tokens // group.tokens_per_block)
        for index, block in enumerate(table[:first_fresh]):
            if not block.is_null and block.block_hash is None:
                table = changed.setdefault(group.group_idx, list(table))
                table[index] = _ComputedBlock(block.block_id)
    if not changed:
        return blocks
    return replace(
        blocks,
        blocks=tuple(changed.get(index, table) for index, table in enumerate(blocks.blocks)),
    )


def present() -> bool:
    """Whether a load after 32 local tokens starts at an unhashed block of the first 16."""
    scheduler, request = fakes.allocation_case(OffloadingConnectorScheduler, local_tokens=32)
    stale, cached, fresh = (
        SimpleNamespace(block_id=1, is_null=False, block_hash=None),
        SimpleNamespace(block_id=2, is_null=False, block_hash=b"h"),
        SimpleNamespace(block_id=3, is_null=False, block_hash=None),
    )
    blocks = SimpleNamespace(blocks=([stale, cached, fresh],))
    try:
        scheduler.update_state_after_alloc(request, blocks, 16)
    except AssertionError:
        return True
    return bool(len(scheduler.manager.loaded) != 1)


def apply(base: type[Any]) -> type[Any]:
    """Hide locally computed blocks from the scan."""

    switch = Switch(NAME)

    class WithLoadStart(base):
        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            def hidden() -> Any:
                status = self._req_status[request.request_id]
                return hide_computed(
                    blocks, self.config.kv_group_configs, status.num_locally_computed_tokens
                )

            if num_external_tokens:
                blocks = switch(self, hidden, blocks)
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    return WithLoadStart


def cured(cls: type[Any], rng: Random) -> bool:
    """Whether a load starts at the local boundary, whatever lies below it."""
    local = 16 * rng.randint(0, 2)
    below = [
        SimpleNamespace(
            block_id=index + 1, is_null=rng.random() < 0.3, block_hash=rng.choice([None, b"h"])
        )
        for index in range(local // 16)
    ]
    fresh = SimpleNamespace(block_id=9, is_null=False, block_hash=None)
    scheduler, request = fakes.allocation_case(cls, local_tokens=local)
    scheduler.update_state_after_alloc(request, KVCacheBlocks(blocks=([*below, fresh],)), 16)
    return scheduler.manager.loaded == [bytes([local // 16])]
