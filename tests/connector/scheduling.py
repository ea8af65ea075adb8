"""vLLM's offloading scheduler and manager, real, on made-up layouts and requests.

Only what surrounds them is made up: no model, no workers, no core scheduler.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import RequestStatus

from kvlens.connector import compat
from kvlens.connector.config import load
from kvlens.connector.corrections import plan
from kvlens.connector.scheduler import scheduler_class


@dataclass
class Group:
    """One KV-cache group; ``window`` for sliding-window groups."""

    kind: str
    tokens: int
    drafter: bool = False
    window: int | None = None

    def spec(self) -> Any:
        if self.kind == "mamba":
            return MambaSpec(
                block_size=self.tokens,
                shapes=((1, 8),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        common = {
            "block_size": self.tokens,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        if self.kind == "sliding_window":
            return SlidingWindowSpec(**common, sliding_window=self.window)
        return FullAttentionSpec(**common)


@dataclass
class Request:
    """A request as the offloading scheduler reads it."""

    request_id: str
    num_prompt_tokens: int
    output_tokens: int = 0
    tokens_per_hash: int = 16
    lookahead: int = 0
    """Tokens after a block that its hash covers as well."""
    seed: int = 1
    status: Any = RequestStatus.RUNNING
    kv_transfer_params: Any = None
    kv_hints: Any = None
    trace_headers: Any = None
    arrival_time: float = 1000.0
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    shared_prefix_boundary: Any = None
    num_computed_tokens: int = -1
    """By default all that have KV: the last sampled token has none."""
    num_in_flight_tokens: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_computed_tokens < 0:
            self.num_computed_tokens = max(self.num_prompt_tokens, self.num_tokens - 1)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.output_tokens

    @property
    def skip_reading_external_kv(self) -> bool:
        return self.skip_reading_prefix_cache

    @property
    def block_hashes(self) -> list[bytes]:
        count = max(0, self.num_tokens - self.lookahead) // self.tokens_per_hash
        return [hashlib.sha256(f"{self.seed}/{index}".encode()).digest() for index in range(count)]

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> str:
        return "stop"


class _Spec(SimpleNamespace):
    def get_manager(self) -> Any:
        return self.manager


def build(
    groups: list[Group],
    *,
    settings: dict[str, Any] | None = None,
    block_drop: bool = True,
    tokens_per_hash: int = 16,
    capacity: int = 4096,
    offload_prompt_only: bool = True,
    extra_config: dict[str, Any] | None = None,
    cls: type[Any] | None = None,
    retention_interval: int | None = None,
    lookahead: int = 0,
) -> Any:
    """The scheduler of this vLLM with the corrections that ``settings`` ask for.

    ``cls`` is another class to build, such as vLLM's own.
    """
    layers = [
        SimpleNamespace(
            group_id=i,
            tokens_per_block=group.tokens,
            sliding_window_size_in_chunks=compat.window_in_chunks(group.spec(), group.tokens),
        )
        for i, group in enumerate(groups)
    ]
    spec = _Spec(
        tokens_per_block=tuple(group.tokens for group in groups),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=1,
        offload_prompt_only=offload_prompt_only,
        extra_config=extra_config or {},
        config=SimpleNamespace(groups=layers),
        kv_events_config=SimpleNamespace(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
        manager=CPUOffloadingManager(capacity),
    )
    speculative = SimpleNamespace(
        use_eagle=lambda: block_drop, use_eagle_block_drop=lambda: block_drop
    )
    vllm_config = SimpleNamespace(
        speculative_config=speculative,
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, prefix_cache_retention_interval=retention_interval
        ),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        num_hash_lookahead_tokens=lookahead,
    )
    cache_groups = []
    for index, group in enumerate(groups):
        cache_group = KVCacheGroupSpec([f"layer{index}"], group.spec())
        cache_group.is_eagle_group = group.drafter
        cache_groups.append(cache_group)
    loaded = load({"kvlens": settings or {}}, {})
    kv_cache_config = SimpleNamespace(kv_cache_groups=cache_groups, cache_hit_alignment_tokens=None)
    cls = cls or scheduler_class(plan(loaded), loaded)
    scheduler = cls(spec, vllm_config, kv_cache_config)
    scheduler.kv_cache_config = kv_cache_config
    return scheduler


def add(scheduler: Any, request: Request) -> Any:
    """Bring a request to the scheduler; returns its state with all keys known."""
    scheduler.on_new_request(request)
    status = scheduler._req_status[request.request_id]
    status.update_offload_keys()
    return status


def store_all(scheduler: Any, request: Request) -> None:
    """Make every chunk of a request resident."""
    status = add(scheduler, request)
    keys = [key for group in status.group_states for key in group.offload_keys]
    scheduler.manager.prepare_store(keys, status.req_context)
    scheduler.manager.complete_store(keys, status.req_context)


def served(scheduler: Any, request: Request, local_tokens: int = 0) -> int | None:
    """Tokens that a lookup of ``request`` answers."""
    if request.request_id not in scheduler._req_status:
        scheduler.on_new_request(request)
    tokens: int | None = scheduler.get_num_new_matched_tokens(request, local_tokens)[0]
    return tokens
