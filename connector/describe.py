"""What an engine is, as far as its public configuration tells: the ``interface`` depth."""

from __future__ import annotations

import socket
import time
import uuid
from math import gcd
from typing import Any

import kvlens.telemetry
from kvlens.connector import engine_facts
from kvlens.connector.support import Support
from kvlens.telemetry.records import EngineInfo, GroupLayout, Layout
from kvlens.telemetry.semconv import Depth, GroupKind

_KINDS = (
    ("mamba", GroupKind.MAMBA),
    ("slidingwindow", GroupKind.SLIDING_WINDOW),
    ("chunkedlocal", GroupKind.CHUNKED_LOCAL),
    ("fullattention", GroupKind.FULL_ATTENTION),
    ("mla", GroupKind.FULL_ATTENTION),
)
"""Part of a spec class' name, lower case -> kind; the first that fits."""


def group_kind(spec: Any) -> str:
    """Kind of a KV-cache group, by the name of its spec class; others by that name."""
    name = type(spec).__name__
    return next((str(kind) for part, kind in _KINDS if part in name.lower()), name)


def layout(vllm_config: Any, kv_cache_config: Any) -> Layout:
    """The engine's KV-cache groups, with the chunks that the configuration asks for."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        block = int(spec.block_size)
        groups.append(
            GroupLayout(
                kv_group=index,
                group_kind=group_kind(spec),
                tokens_per_block=block,
                tokens_per_chunk=block * _blocks_per_chunk(extra, block),
                window=getattr(spec, "sliding_window", None),
                attention_chunk=getattr(spec, "attention_chunk_size", None),
                drafter=bool(getattr(group, "is_eagle_group", False)),
                hash_lookahead=engine_facts.hash_lookahead(vllm_config),
            )
        )
    return Layout(groups=groups, tokens_per_hash=gcd(*(g.tokens_per_block for g in groups)))


def _blocks_per_chunk(extra: Any, block: int) -> int:
    if factor := extra.get("blocks_per_chunk"):
        return max(1, int(factor))
    return max(1, int(extra.get("block_size") or block) // block)


def engine(
    vllm_config: Any, kv_cache_config: Any, support: Support, connector: str, **more: Any
) -> EngineInfo:
    """An engine at ``interface`` depth; ``more`` are further fields of :class:`EngineInfo`."""
    return EngineInfo(
        **identity(vllm_config, support, connector),
        layout=layout(vllm_config, kv_cache_config),
        lookup="stock",
        depth=str(Depth.INTERFACE),
        block_drop=engine_facts.drops_last_block(vllm_config),
        hash_seed_fixed=engine_facts.hash_seed_fixed(vllm_config),
        **more,
    )


def identity(vllm_config: Any, support: Support, connector: str) -> dict[str, Any]:
    """What every engine says of itself, at any depth."""
    return {
        "engine_id": str(vllm_config.kv_transfer_config.engine_id),
        "incarnation_id": uuid.uuid4().hex,
        "model": str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
        "started_at": time.time(),
        "kvlens_version": kvlens.telemetry.__version__,
        "vllm_version": support.version,
        "dp_rank": engine_facts.dp_rank(vllm_config),
        "devices": int(vllm_config.parallel_config.world_size),
        "host": socket.gethostname(),
        "connector": connector,
        "tested": support.tested,
        "not_seen": support.not_seen,
    }
