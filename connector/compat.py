"""What vLLM's offloading scheduler can do, answered by looking at the installed code.

Everything that differs between releases and is not one of the corrections. Imported
only at ``groups`` depth: it needs vLLM's private modules.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import OffloadingManager

SEARCH = (
    "_lookup_complete_chunks"
    if hasattr(OffloadingConnectorScheduler, "_lookup_complete_chunks")
    else "_lookup"
)
"""vLLM's search over complete chunks: 0.28 split it off, to extend its answer by a partial tail."""
JUNCTION = "_maybe_register_shared_prefix_junction"
TELLS_ATTENTION = hasattr(OffloadingConnectorScheduler, JUNCTION)
"""Whether that search also says how far full attention alone would reach (0.34)."""


def reaches_load_window() -> bool:
    """Whether lookups ask windowed groups as far back as allocation will load (0.30)."""
    return hasattr(GroupOffloadConfig, "load_window_size_in_chunks")


def loads_partial_tail() -> bool:
    """Whether a boundary inside the last chunk can be stored and loaded (0.28)."""
    return "supports_partial_tail" in SchedulerOffloadConfig._fields


def offloads_chunked_local() -> bool:
    """Whether chunked-local attention groups can be offloaded; they end 0.27 at start."""
    return any(hasattr(module, "ChunkedLocalAttentionSpec") for module in (config, scheduler))


def bounds_by_other_groups() -> bool:
    """Whether groups that are not offloaded limit what is loaded (0.30)."""
    method = OffloadingConnectorScheduler.get_num_new_matched_tokens
    return "max_num_new_tokens" in inspect.signature(method).parameters


def caps_loads() -> bool:
    """Whether a request can limit what it loads, with ``max_load_tokens`` (0.31)."""
    return "max_load_tokens" in RequestOffloadState.__slots__


def cap_spares_token() -> bool:
    """Whether a limit on what is loaded is lowered by the token that windows leave over.

    0.34 lowers the request's tokens by it, and then applies the limit.
    """
    return not TELLS_ATTENTION


def loads_synchronously() -> bool:
    """Whether a small load can be part of the step that needs it (0.33)."""
    return hasattr(OffloadingConnectorScheduler, "_reserve_sync_load")


def locks_manager() -> bool:
    """Whether the manager is held for the whole of a step, against threads of its own (0.33)."""
    return hasattr(OffloadingManager, "lock")


def window_in_chunks(kv_cache_spec: Any, tokens_per_chunk: int) -> int | None:
    """Chunks that the lookup of a windowed group needs in a row; None for full attention."""
    module = config if hasattr(config, "get_sliding_window_size_in_chunks") else scheduler
    chunks: int | None = module.get_sliding_window_size_in_chunks(kv_cache_spec, tokens_per_chunk)
    return chunks


def tokens_per_hash(scheduler_config: Any) -> int:
    """Tokens of one block hash; 0.27 does not keep the number itself."""
    group = scheduler_config.kv_group_configs[0]
    return int(group.tokens_per_chunk // group.hashes_per_chunk)


def hit_tokens(found: Any) -> int | None:
    """Tokens that vLLM's search found; None to be asked again later."""
    tokens: int | None = found[0] if TELLS_ATTENTION else found
    return tokens


def retention_interval(scheduler_config: Any) -> int | None:
    """Tokens between the windows that are stored besides a prompt's last; None: all (to 0.29)."""
    return getattr(scheduler_config, "retention_interval", None)


def lower_tiers(offloading_scheduler: Any) -> bool:
    """Whether there are tiers below the one that chunks are loaded from."""
    return bool(getattr(offloading_scheduler.manager, "secondary_tiers", ()))
