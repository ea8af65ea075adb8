"""Defect: no group annotated as drafter, so every group is treated as one.

With shared-group MTP the draft layer sits in the target's full-attention group
and nothing is annotated. ``SchedulerOffloadConfig.from_spec`` then marks all
groups, the volatile-tail pop applies to all, and a group whose servable window
is one chunk brings every request to zero (vllm-project/vllm #52735).

Correction: ``from_spec`` sees a configuration without block drop, so that only
annotated groups are drafter groups. A draft layer whose KV is one chunk stale
can lower acceptance, never correctness: the target verifies every draft.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)

from kvlens.connector.corrections import fakes

NAME = "drafter_fallback"
SUMMARY = "without an annotated drafter group every group loses its last chunk"
FIXED_IN = "0.30.0"


class _WithoutBlockDrop:
    """A VllmConfig whose speculative decoding does not drop the last block."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        if name == "speculative_config":
            return None
        return getattr(self._vllm_config, name)


def present() -> bool:
    """Whether ``from_spec`` marks groups that nothing annotates."""
    speculative = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
    config = SchedulerOffloadConfig.from_spec(
        fakes.spec(tokens_per_block=(16,)),
        fakes.vllm_config(speculative),
        fakes.kv_cache_config(fakes.full_attention(16)),
    )
    return any(group.is_eagle_group for group in config.kv_group_configs)


def apply(base: type[Any]) -> type[Any]:
    """Hide block drop from the constructor's ``from_spec``."""

    class WithoutDrafterFallback(base):
        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, _WithoutBlockDrop(vllm_config), kv_cache_config)

    return WithoutDrafterFallback


def cured(_cls: type[Any], rng: Random) -> bool:
    """Whether, with block drop, only annotated groups of a made-up layout are drafter groups."""
    sizes = tuple(16 * rng.randint(1, 8) for _ in range(rng.randint(1, 6)))
    annotated = [rng.random() < 0.3 for _ in sizes]
    cache = fakes.kv_cache_config(*(fakes.full_attention(size) for size in sizes))
    for group, drafter in zip(cache.kv_cache_groups, annotated, strict=True):
        group.is_eagle_group = drafter
    drops = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
    config = SchedulerOffloadConfig.from_spec(
        fakes.spec(tokens_per_block=sizes), _WithoutBlockDrop(fakes.vllm_config(drops)), cache
    )
    return [bool(group.is_eagle_group) for group in config.kv_group_configs] == annotated
