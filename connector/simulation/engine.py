"""vLLM's own scheduler, KV-cache manager and both sides of the connector, without a model."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine import arg_utils
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvlens.connector import engine_facts
from kvlens.connector.config import SECTION
from kvlens.connector.simulation.medium import (
    CAPACITY,
    SimulatedOffloadingSpec,
    SimulationError,
    Tier,
    Transfers,
)
from kvlens.connector.simulation.scenario import Group, Scenario

MAX_TOKENS = 1 << 20
"""Longest request, in tokens."""
VOCABULARY = 1 << 16
_HEAD = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
_RETENTION = "prefix_cache_retention_interval"
_PAGE_BYTES = 4096
"""Made up: no page exists."""


@dataclass
class Engine:
    """What EngineCore and its one worker hold."""

    vllm_config: Any
    scheduler: Any
    worker: Any
    """The connector's worker side."""
    transfers: Transfers
    tokens_per_hash: int
    hasher: Any
    """Block hasher of requests."""

    @property
    def connector(self) -> Any:
        """The connector's scheduler side."""
        return self.scheduler.connector

    def attach_tier(self) -> Tier:
        """Put the simulated tier before the manager; call once observers are attached."""
        return Tier(self.connector.connector_scheduler.manager, self.transfers)

    def shutdown(self) -> None:
        """End both sides of the connector and the scheduler."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def build(scenario: Scenario, settings: dict[str, Any]) -> Engine:
    """Build the engine of a scenario; raises :class:`SimulationError` where vLLM refuses it.

    ``settings`` is the ``kvlens`` section of ``kv_connector_extra_config``.
    """
    try:
        return _build(scenario, settings)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise SimulationError(
            f"vLLM refuses this layout or configuration: {_said(error)}"
        ) from error


@contextmanager
def _hash_seed(seed: str) -> Iterator[None]:
    """Let vLLM hash as with this ``PYTHONHASHSEED``, so that runs are equal."""
    name = "PYTHONHASHSEED"
    before = os.environ.get(name)
    os.environ[name] = seed
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _said(error: Exception) -> str:
    """An error in one line; pydantic's without the whole configuration in it."""
    details = getattr(error, "errors", None)
    if details is not None:
        return "; ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details())
    return str(error) or type(error).__name__


def _build(scenario: Scenario, settings: dict[str, Any]) -> Engine:
    vllm_config = _vllm_config(scenario, settings)
    cache = _kv_cache_config(scenario)
    cache.prefix_cache_retention_interval = getattr(vllm_config.cache_config, _RETENTION, None)
    vllm_config.cache_config.num_gpu_blocks = cache.num_blocks
    block_size, tokens_per_hash = resolve_kv_cache_block_sizes(cache, vllm_config)
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    with _hash_seed("0"):  # older releases draw one at random
        init_none_hash(hash_function)
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=tokens_per_hash,
        log_stats=False,
    )
    connector_worker = KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=cache
    )
    lookahead = [ahead] if (ahead := engine_facts.hash_lookahead(vllm_config)) else []
    transfers = Transfers(scenario.transfer_steps, _PAGE_BYTES, scenario.step_seconds)
    connector_worker.connector_worker.worker = transfers
    # 0.34 turns blocks into addresses before it hands them over: of no tensors here.
    no_tensors = SimpleNamespace(tensors=[], group_data_refs=[[] for _ in cache.kv_cache_groups])
    connector_worker.connector_worker._kv_caches = no_tensors
    connector_worker.measure_jobs()  # its own worker side is there only now
    return Engine(
        vllm_config=vllm_config,
        scheduler=scheduler,
        worker=connector_worker,
        transfers=transfers,
        tokens_per_hash=tokens_per_hash,
        hasher=get_request_block_hasher(tokens_per_hash, hash_function, *lookahead),
    )


def _vllm_config(scenario: Scenario, settings: dict[str, Any]) -> Any:
    layout = scenario.layout
    states = {group.tokens_per_block for group in layout.groups if group.kind == "mamba"}
    speculative = None
    if scenario.speculative != "none":
        speculative = SpeculativeConfig(
            method="ngram", prompt_lookup_max=1, num_speculative_tokens=scenario.draft_tokens
        )
    # With one group vLLM hashes by its block, whatever this says.
    finer = layout.tokens_per_hash if len(layout.groups) > 1 else None
    vllm_config = VllmConfig(
        model_config=_model_config(),
        cache_config=CacheConfig(
            # Prefill is split where states are kept, so states' block size comes first.
            block_size=min(states or {group.tokens_per_block for group in layout.groups}),
            enable_prefix_caching=scenario.gpu_prefix_cache,
            prefix_match_unit=finer,
            mamba_cache_mode=layout.mamba_cache_mode if states else "none",
            **_retention(scenario),
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            max_num_seqs=scenario.max_requests,
            max_num_batched_tokens=max(scenario.max_batched_tokens, scenario.max_requests),
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVLensOffloadingConnector",
            kv_connector_module_path="kvlens.connector",
            kv_role="kv_both",
            engine_id="simulation",
            kv_load_failure_policy=scenario.load_failure_policy,
            kv_connector_extra_config={
                "spec_name": SimulatedOffloadingSpec.__name__,
                "spec_module_path": SimulatedOffloadingSpec.__module__,
                "cpu_bytes_to_use": scenario.capacity_chunks * _PAGE_BYTES,
                CAPACITY: scenario.capacity_chunks,
                "blocks_per_chunk": layout.blocks_per_chunk,
                "offload_prompt_only": scenario.offload_prompt_only,
                "store_threshold": scenario.store_threshold,
                SECTION: settings | {"telemetry": False},
            },
        ),
        speculative_config=speculative,
    )
    # What a model decides, and what a model-free configuration would not accept, comes after.
    vllm_config.scheduler_config.max_num_batched_tokens = scenario.max_batched_tokens
    vllm_config.scheduler_config.async_scheduling = scenario.async_scheduling
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False
    if speculative is not None:
        speculative.method = scenario.speculative
    _look_ahead(vllm_config, scenario)
    return vllm_config


def _look_ahead(vllm_config: Any, scenario: Scenario) -> None:
    """Let vLLM decide again whether block hashes look ahead: the method is known only now."""
    speculative, wanted = vllm_config.speculative_config, scenario.lookahead_hashes
    if speculative is not None and engine_facts.hashes_look_ahead():
        speculative.disable_lookahead_block_hashes = wanted is False
        vllm_config.num_hash_lookahead_tokens = vllm_config._resolve_num_hash_lookahead_tokens()
    if wanted is True and not engine_facts.hash_lookahead(vllm_config):
        raise ValueError(
            "`lookahead_hashes` needs vLLM 0.34 or newer, and `speculative` mtp or eagle"
        )


def _retention(scenario: Scenario) -> dict[str, Any]:
    """What vLLM's front end makes of ``--prefix-cache-retention-interval``."""
    interval = scenario.retention_interval
    states = any(group.kind == "mamba" for group in scenario.layout.groups)
    if interval == "default":
        # 0.29 keeps all states for hybrid models with EAGLE or MTP.
        dense = hasattr(arg_utils, "PREFIX_CACHE_RETENTION_INTERVAL_UNSET") and states
        return {_RETENTION: None} if dense and scenario.speculative != "none" else {}
    if interval == "all" and _RETENTION not in CacheConfig.__dataclass_fields__:
        return {}
    return {_RETENTION: None if interval == "all" else interval}


@functools.cache
def _model_config() -> Any:
    """A model that is never built: vLLM wants one to read lengths from."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "torch_dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return ModelConfig(
            model=folder,
            served_model_name="simulation",
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
            dtype="float32",
            seed=0,
            enforce_eager=True,
        )


def _kv_cache_config(scenario: Scenario) -> Any:
    groups = []
    for index, group in enumerate(scenario.layout.groups):
        cache_group = KVCacheGroupSpec([f"layer.{index}"], _spec(group, scenario))
        cache_group.is_eagle_group = group.drafter
        groups.append(cache_group)
    layers = [f"layer.{index}" for index in range(len(groups))]
    placement: dict[str, Any] = {"shared_by": layers}
    if "layers" in KVCacheTensor.__dataclass_fields__:  # 0.29 and newer
        placement = {"layers": layers, "layer_stride": 0, "block_stride": _PAGE_BYTES}
    return KVCacheConfig(
        num_blocks=scenario.gpu_blocks,
        kv_cache_tensors=[KVCacheTensor(size=_PAGE_BYTES * scenario.gpu_blocks, **placement)],
        kv_cache_groups=groups,
    )


def _spec(group: Group, scenario: Scenario) -> Any:
    size = group.tokens_per_block
    if group.kind == "mamba":
        return MambaSpec(
            block_size=size,
            shapes=((1, 64),),
            dtypes=(torch.float32,),
            mamba_cache_mode=scenario.layout.mamba_cache_mode,
            num_speculative_blocks=0 if scenario.speculative == "none" else scenario.draft_tokens,
        )
    if group.kind == "sliding_window":
        return SlidingWindowSpec(block_size=size, sliding_window=group.window, **_HEAD)
    if group.kind == "chunked_local":
        return ChunkedLocalAttentionSpec(
            block_size=size, attention_chunk_size=group.attention_chunk, **_HEAD
        )
    return FullAttentionSpec(block_size=size, **_HEAD)
