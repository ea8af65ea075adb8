"""Small made-up objects on which the probes run vLLM's own code.

They carry the attributes that the probed methods of the supported releases
read, and record what reaches the manager. Nothing here is used while serving.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
)
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import RequestStatus

from kvlens.connector import compat

_REQUEST = "probe"
TOKENS_PER_HASH = 16


def full_attention(block_size: int) -> Any:
    """A full-attention spec with blocks of ``block_size`` tokens."""
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )


def spec(tokens_per_block: tuple[int, ...]) -> Any:
    """An OffloadingSpec as ``from_spec`` reads it."""
    groups = tuple(
        SimpleNamespace(group_id=index, tokens_per_block=tokens, sliding_window_size_in_chunks=None)
        for index, tokens in enumerate(tokens_per_block)
    )
    return SimpleNamespace(
        tokens_per_block=tokens_per_block,
        tokens_per_hash=min(tokens_per_block),
        blocks_per_chunk=1,
        offload_prompt_only=True,
        extra_config={},
        config=SimpleNamespace(groups=groups),
    )


def vllm_config(speculative: Any) -> Any:
    """A VllmConfig as ``from_spec`` reads it."""
    return SimpleNamespace(
        speculative_config=speculative,
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        num_hash_lookahead_tokens=0,
    )


def kv_cache_config(*specs: Any) -> Any:
    """A KVCacheConfig with one unannotated group per spec."""
    groups = [KVCacheGroupSpec([f"layer{i}"], item) for i, item in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


class _Manager:
    """Every lookup hits; offers and loads are recorded."""

    lock = nullcontext()

    def __init__(self) -> None:
        self.offered: list[bytes] = []
        self.loaded: list[bytes] = []

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return LookupResult.HIT

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        self.loaded += keys
        return SimpleNamespace(block_ids=[])

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        self.offered += keys
        return SimpleNamespace(keys_to_store=[], evicted_keys=[], store_spec=None)


def _group(index: int, kv_spec: Any, tokens: int, drafter: bool) -> Any:
    return SimpleNamespace(
        group_idx=index,
        tokens_per_block=tokens,
        tokens_per_chunk=tokens,
        hashes_per_chunk=1,
        sliding_window_size_in_chunks=None,
        alignment_chunk_count=None,
        kv_cache_spec=kv_spec,
        manager_cls=SimpleNamespace(reachable_block_mask=lambda **_: None),
        requires_cow_source=False,
        is_eagle_group=drafter,
    )


def _scheduler(cls: type[Any], groups: list[Any]) -> Any:
    scheduler: Any = object.__new__(cls)
    scheduler.config = SimpleNamespace(
        kv_group_configs=tuple(groups),
        blocks_per_chunk=1,
        tokens_per_hash=TOKENS_PER_HASH,
        num_workers=1,
        offload_prompt_only=False,
        supports_partial_tail=False,
        alignment_tokens=None,
        retention_interval=None,
        dcp_world_size=1,
    )
    scheduler.manager = _Manager()
    scheduler._full_attention_groups = scheduler._lookup_groups = tuple(range(len(groups)))
    scheduler._sliding_window_groups = ()
    scheduler._mamba_align_size = None
    scheduler.use_lookahead_block_hashes = False
    scheduler._chunks_being_loaded = None
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
    scheduler._current_batch_allocated_block_ids = set()
    scheduler._current_batch_load_jobs = {}
    scheduler._current_batch_sync_loads = set()
    scheduler._jobs = {}
    scheduler._job_counter = 0
    return scheduler


def _group_state(keys: int) -> Any:
    return SimpleNamespace(
        offload_keys=[bytes([index]) for index in range(keys)],
        block_ids=list(range(1, keys + 1)),
        next_stored_chunk_idx=0,
    )


def _status(scheduler: Any, request: Any, key_counts: list[int], local_tokens: int = 0) -> Any:
    status = SimpleNamespace(
        config=scheduler.config,
        req=request,
        req_context=None,
        group_states=[_group_state(count) for count in key_counts],
        offloading_context=SimpleNamespace(policy=None),
        num_locally_computed_tokens=local_tokens,
        max_load_tokens=None,
        max_offload_tokens=None,
        partial_tail_boundary=None,
        load_key_ranges=[],
        transfer_jobs=set(),
    )
    status.storable_chunks = partial(RequestOffloadState.storable_chunks, status)
    status.advance_stored_idx = lambda *_: None
    scheduler._req_status = {request.request_id: status}
    return status


def lookup_case(
    cls: type[Any], groups: list[tuple[Any, int, bool]], num_tokens: int
) -> tuple[Any, Any]:
    """Scheduler and request state for a lookup of ``num_tokens``, all resident.

    ``groups`` holds (spec, tokens per chunk, drafter).
    """
    scheduler = _scheduler(cls, [_group(i, *group) for i, group in enumerate(groups)])
    request = SimpleNamespace(
        request_id=_REQUEST,
        num_tokens=num_tokens,
        block_hashes=[bytes([index]) for index in range(num_tokens // TOKENS_PER_HASH)],
    )
    counts = [num_tokens // tokens for _, tokens, _ in groups]
    return scheduler, _status(scheduler, request, counts)


def run_lookup(scheduler: Any, status: Any, *caps: int) -> int | None:
    """vLLM's search over complete chunks; older releases have one method for all."""
    return compat.hit_tokens(getattr(scheduler, compat.SEARCH)(status, *caps))


def storable_chunks(state: Any, group: Any, group_state: Any, tokens: int) -> int:
    """Chunks of ``tokens`` that vLLM would store, with block hashes that do not look ahead."""
    method = RequestOffloadState.storable_chunks
    drops = [True] if "apply_eagle_drop" in signature(method).parameters else []
    return int(method(state, group, group_state, tokens, *drops))


def window_case(cls: type[Any]) -> tuple[Any, Any]:
    """Scheduler with full attention (16), a window of 64 (16) and states (64), and the window.

    Sizes are tokens, chunks in parentheses; windows are kept at the end of prompts only.
    """
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    groups = [_group(0, full_attention(16), 16, False), _group(1, window, 16, False)]
    groups[1].manager_cls = SlidingWindowManager
    scheduler = _scheduler(cls, groups)
    scheduler.config.alignment_tokens = 16
    scheduler.config.retention_interval = 0
    return scheduler, groups[1]


def allocation_case(cls: type[Any], local_tokens: int) -> tuple[Any, Any]:
    """Scheduler and request for an allocation after ``local_tokens``, blocks of 16."""
    scheduler = _scheduler(cls, [_group(0, full_attention(16), 16, False)])
    request = SimpleNamespace(request_id=_REQUEST, num_tokens=local_tokens + 17)
    _status(scheduler, request, [3], local_tokens)
    return scheduler, request


def finished_store_case(cls: type[Any], prompt: int, total: int) -> int:
    """Chunks of 16 tokens that a request finished at ``total`` tokens offers."""
    scheduler = _scheduler(cls, [_group(0, full_attention(16), 16, False)])
    request = SimpleNamespace(
        request_id=_REQUEST,
        status=RequestStatus.FINISHED_STOPPED,
        is_finished=lambda: True,
        num_tokens=total,
        num_prompt_tokens=prompt,
        num_computed_tokens=total - 1,
    )
    _status(scheduler, request, [total // 16])
    output = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids={_REQUEST})
    scheduler._build_store_jobs(output)
    return len(scheduler.manager.offered)
