"""The surface of vLLM that the connector stands on, checked once at start.

Everything that differs between vLLM releases and is not one of the corrections
is answered here, by looking at the installed code and not at its version.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

import vllm
from packaging.version import InvalidVersion, Version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadingManager

from kvlens.connector import versions
from kvlens.connector.versions import UnsupportedVLLMError as UnsupportedVLLMError

TESTED = (Version(versions.SUPPORTED[0].version), Version(versions.SUPPORTED[-1].version))
"""First and last release that the test suite runs on."""
OVERRIDE_ENV = "KVLENS_UNTESTED_VLLM"
SEARCH = (
    "_lookup_complete_chunks"
    if hasattr(OffloadingConnectorScheduler, "_lookup_complete_chunks")
    else "_lookup"
)
"""vLLM's search over complete chunks: 0.28 split it off, to extend its answer by a partial tail."""
JUNCTION = "_maybe_register_shared_prefix_junction"
TELLS_ATTENTION = hasattr(OffloadingConnectorScheduler, JUNCTION)
"""Whether that search also says how far full attention alone would reach (0.34)."""
_VOLATILE_TIERS = frozenset({"example", "p2p"})
"""Secondary tiers whose content is gone once their engines are."""

_SURFACE: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (OffloadingConnectorScheduler, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    (OffloadingConnectorScheduler, "_maximal_prefix_lookup", ("keys", "req", "group_config")),
    (OffloadingConnectorScheduler, "_sliding_window_lookup", ("keys", "sliding_window_size")),
    (OffloadingConnectorScheduler, "_calc_num_offloadable_tokens", ("req_status",)),
    (OffloadingConnectorScheduler, "get_num_new_matched_tokens", ("request",)),
    (OffloadingConnectorScheduler, "update_state_after_alloc", ("request", "blocks")),
    (OffloadingConnectorScheduler, "build_connector_meta", ("scheduler_output",)),
    (OffloadingConnectorScheduler, "update_connector_output", ("connector_output",)),
    (OffloadingConnectorScheduler, "request_finished", ("request",)),
    (OffloadingConnectorScheduler, "on_new_request", ("request",)),
    (OffloadingConnectorScheduler, "reset_cache", ()),
    (OffloadingConnectorScheduler, "get_stats", ()),
    (RequestOffloadState, "storable_chunks", ("group_config", "num_offloadable_tokens")),
    (SchedulerOffloadConfig, "from_spec", ("spec", "vllm_config", "kv_cache_config")),
)


def vllm_version() -> str:
    """Version of the installed vLLM."""
    return str(vllm.__version__)


def missing_surface() -> list[str]:
    """Methods or parameters that kvlens overrides and this vLLM does not have."""
    missing = []
    for owner, name, parameters in _SURFACE:
        method = getattr(owner, name, None)
        if method is None:
            missing.append(f"{owner.__name__}.{name}")
            continue
        have = inspect.signature(method).parameters
        missing += [f"{owner.__name__}.{name}({p})" for p in parameters if p not in have]
    return missing


@dataclass(frozen=True)
class Support:
    """What kvlens does with the installed vLLM."""

    tested: bool = True
    """Inside the tested range: corrected as configured. Outside: vLLM's own lookup."""
    observed: bool = True
    """Whether vLLM has all that the hooks need."""
    warning: str | None = None


def require_supported() -> Support:
    """Check version and surface of the installed vLLM.

    Outside the tested range it raises :class:`UnsupportedVLLMError`, or, with
    ``KVLENS_UNTESTED_VLLM=1``, answers with a warning and what is left to do:
    nothing is corrected there, because a probe that was written for other code
    proves nothing, and nothing is observed if a hook would not fit.
    """
    installed, missing = vllm_version(), missing_surface()
    lacks = f"lacks what kvlens overrides ({', '.join(missing)})"
    if _in_range(installed):
        if not missing:
            return Support()
        raise UnsupportedVLLMError(
            f"vLLM {installed} {lacks}, unlike the releases that kvlens is tested with "
            f"({versions.RANGE}). Use the stock OffloadingConnector with this vLLM."
        )
    outside = f"vLLM {installed} is outside the range that kvlens is tested with ({versions.RANGE})"
    if os.environ.get(OVERRIDE_ENV) != "1":
        raise UnsupportedVLLMError(
            f"{outside}. Install a vLLM of that range, use the stock OffloadingConnector, or set "
            f"{OVERRIDE_ENV}=1 to observe vLLM's own lookup without correcting it."
        )
    left = f"and not observed: it {lacks}" if missing else "and observed"
    return Support(
        tested=False,
        observed=not missing,
        warning=f"{outside}; because {OVERRIDE_ENV}=1 it runs with its own lookup, "
        f"uncorrected {left}",
    )


def _in_range(installed: str) -> bool:
    try:
        version = Version(installed)
    except InvalidVersion:
        return False
    # Later patch releases of the last minor one are taken for tested too.
    return TESTED[0] <= Version(version.base_version) and version.release[:2] <= TESTED[1].release


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


def hashes_look_ahead() -> bool:
    """Whether a block's hash can cover tokens after the block (0.34)."""
    return "num_hash_lookahead_tokens" in VllmConfig.__dataclass_fields__


def hash_lookahead(vllm_config: Any) -> int:
    """Tokens after a block that its hash covers as well (0.34, with EAGLE or MTP), else 0."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


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


def load_cap(req_status: Any, max_new_tokens: int | None) -> int | None:
    """Cap on tokens loadable beyond the local ones, None if there is none."""
    cap: int | None = getattr(req_status, "max_load_tokens", None)
    if cap is None or (max_new_tokens is not None and max_new_tokens < cap):
        return max_new_tokens
    return cap


def retention_interval(scheduler_config: Any) -> int | None:
    """Tokens between the windows that are stored besides a prompt's last; None: all (to 0.29)."""
    return getattr(scheduler_config, "retention_interval", None)


def persistent_tier(spec: Any) -> bool:
    """Whether one of the spec's tiers outlives the engine (files, object store)."""
    tiers = spec.extra_config.get("secondary_tiers") or ()
    return any(tier.get("type") not in _VOLATILE_TIERS for tier in tiers)


def dp_rank(vllm_config: Any) -> int:
    """Data parallel rank; vLLM sets ``data_parallel_rank`` to 0 where the model has no experts."""
    return int(vllm_config.parallel_config.data_parallel_index)


def lower_tiers(offloading_scheduler: Any) -> bool:
    """Whether there are tiers below the one that chunks are loaded from."""
    return bool(getattr(offloading_scheduler.manager, "secondary_tiers", ()))


def hash_seed_fixed(vllm_config: Any) -> bool:
    """Whether every process hashes the same prompt alike.

    ``PYTHONHASHSEED`` sees to it. Without it vLLM has a fixed seed for
    cryptographic hashes only, and older releases have none.
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return True
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") and "xxhash" not in algorithm
