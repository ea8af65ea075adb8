"""The surface of vLLM that the connector stands on, checked once at start.

Everything that differs between vLLM releases and is not one of the corrections
is answered here, by looking at the installed code and not at its version.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import vllm
from packaging.version import InvalidVersion, Version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
)

TESTED = (Version("0.29.0"), Version("0.32.0"))
"""First and last release that the test suite runs on."""
OVERRIDE_ENV = "KVLENS_UNTESTED_VLLM"

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


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is outside what kvlens was tested with."""


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


def require_supported() -> str | None:
    """Check version and surface.

    Returns a warning when an untested version was asked for by
    ``KVLENS_UNTESTED_VLLM=1``, None when all is tested. Raises
    :class:`UnsupportedVLLMError` otherwise.
    """
    installed = vllm_version()
    tested = f"{TESTED[0]} to {TESTED[1]}"
    if missing := missing_surface():
        raise UnsupportedVLLMError(
            f"vLLM {installed} lacks what kvlens overrides ({', '.join(missing)}); kvlens is "
            f"tested with vLLM {tested}. Use the stock OffloadingConnector with this vLLM."
        )
    try:
        version = Version(Version(installed).base_version)
    except InvalidVersion:
        version = None
    if version is not None and TESTED[0] <= version <= TESTED[1]:
        return None
    if os.environ.get(OVERRIDE_ENV) == "1":
        return (
            f"vLLM {installed} is outside the range that kvlens is tested with ({tested}); "
            f"running because {OVERRIDE_ENV}=1"
        )
    raise UnsupportedVLLMError(
        f"vLLM {installed} is outside the range that kvlens is tested with ({tested}). Install "
        f"a vLLM of that range, use the stock OffloadingConnector, or set {OVERRIDE_ENV}=1 to "
        f"run all the same."
    )


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


def reaches_load_window() -> bool:
    """Whether lookups ask windowed groups as far back as allocation will load (0.32)."""
    return hasattr(GroupOffloadConfig, "load_window_size_in_chunks")


def load_cap(req_status: Any, max_new_tokens: int | None) -> int | None:
    """Cap on tokens loadable beyond the local ones, None if there is none."""
    caps = [
        cap
        for cap in (getattr(req_status, "max_load_tokens", None), max_new_tokens)
        if cap is not None
    ]
    return min(caps) if caps else None
