"""Facts about an engine that its public configuration tells."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils

_VOLATILE_TIERS = frozenset({"example", "p2p"})
"""Secondary tiers whose content is gone once their engines are."""


def capacity_chunks(spec: Any) -> int | None:
    """Chunks that the offload tier holds; None if the spec does not say."""
    for name in ("num_chunks", "num_blocks"):
        value = getattr(spec, name, None)
        if isinstance(value, int):
            return value
    return None


def drops_last_block(vllm_config: Any) -> bool:
    """Whether speculative decoding makes the last block volatile (EAGLE, MTP)."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    for name in ("use_eagle_block_drop", "use_eagle"):
        method = getattr(speculative, name, None)
        if method is not None:
            return bool(method())
    return False


def persistent_tier(spec: Any) -> bool:
    """Whether one of the spec's tiers outlives the engine (files, object store)."""
    tiers = spec.extra_config.get("secondary_tiers") or ()
    return any(tier.get("type") not in _VOLATILE_TIERS for tier in tiers)


def dp_rank(vllm_config: Any) -> int:
    """Data parallel rank; vLLM sets ``data_parallel_rank`` to 0 where the model has no experts."""
    return int(vllm_config.parallel_config.data_parallel_index)


def hash_seed_fixed(vllm_config: Any) -> bool:
    """Whether every process hashes the same prompt alike.

    ``PYTHONHASHSEED`` sees to it. Without it vLLM has a fixed seed for
    cryptographic hashes only, and older releases have none.
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and "xxhash" not in algorithm


def hash_lookahead(vllm_config: Any) -> int:
    """Tokens after a block that its hash covers as well (0.34, with EAGLE or MTP), else 0."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


def hashes_look_ahead() -> bool:
    """Whether a block's hash can cover tokens after the block (0.34)."""
    return "num_hash_lookahead_tokens" in VllmConfig.__dataclass_fields__
