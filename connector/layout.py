"""What a running scheduler offloads, as a :class:`records.Layout`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvlens.connector import compat, engine_facts
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import GroupKind


def group_kind(spec: Any) -> str:
    """Kind of a KV-cache group, by vLLM's spec class; other specs by their name."""
    # FullAttentionSpec last: some vLLM releases derive windowed specs from it.
    for cls, kind in (
        (MambaSpec, GroupKind.MAMBA),
        (SlidingWindowSpec, GroupKind.SLIDING_WINDOW),
        (ChunkedLocalAttentionSpec, GroupKind.CHUNKED_LOCAL),
        (FullAttentionSpec, GroupKind.FULL_ATTENTION),
    ):
        if isinstance(spec, cls):
            return str(kind)
    return str(type(spec).__name__)


def describe_group(group: Any, spec: Any, drafter: bool, lookahead: int) -> GroupLayout:
    """Describe one of the scheduler's groups, which holds KV data as ``spec`` says.

    ``lookahead``: tokens after a block that its hash covers as well.
    """
    windowed, local = (
        isinstance(spec, SlidingWindowSpec),
        isinstance(spec, ChunkedLocalAttentionSpec),
    )
    return GroupLayout(
        kv_group=group.group_idx,
        group_kind=group_kind(spec),
        tokens_per_block=group.tokens_per_block,
        tokens_per_chunk=group.tokens_per_chunk,
        window=spec.sliding_window if windowed else None,
        extra_retained=getattr(spec, "extra_retained_tokens", 0) or 0,
        attention_chunk=spec.attention_chunk_size if local else None,
        drafter=drafter,
        drafter_used=bool(group.is_eagle_group and not lookahead),
        hash_lookahead=lookahead,
    )


def describe(scheduler: Any, kv_cache_config: Any, vllm_config: Any) -> Layout:
    """Describe the groups of an ``OffloadingConnectorScheduler``.

    ``drafter`` is what ``kv_cache_groups`` annotates, ``drafter_used`` what the
    scheduler made of it: on affected releases the two differ.
    """
    config, lookahead = scheduler.config, engine_facts.hash_lookahead(vllm_config)
    groups = []
    for group in config.kv_group_configs:
        cache_group = kv_cache_config.kv_cache_groups[group.group_idx]
        drafter = bool(getattr(cache_group, "is_eagle_group", False))
        groups.append(describe_group(group, cache_group.kv_cache_spec, drafter, lookahead))
    return Layout(
        groups=groups,
        tokens_per_hash=compat.tokens_per_hash(config),
        blocks_per_chunk=config.blocks_per_chunk,
        partial_tail=bool(getattr(config, "supports_partial_tail", False)),
        cap_spares_token=compat.cap_spares_token(),
    )
