"""What an engine is, at ``groups`` depth: read from vLLM's own offloading scheduler."""

from __future__ import annotations

from typing import Any

from kvlens.connector import compat, corrections, describe, engine_facts, layout
from kvlens.connector.support import Support
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Depth


def engine(
    vllm_config: Any, kv_cache_config: Any, scheduler: Any, building: Any, support: Support
) -> EngineInfo:
    """Describe an engine whose scheduler side is ``scheduler``, made from ``building.spec``."""
    spec = building.spec
    return EngineInfo(
        **describe.identity(vllm_config, support, "OffloadingConnector"),
        layout=layout.describe(scheduler, kv_cache_config, vllm_config),
        lookup=scheduler.lookup_mode,
        depth=str(Depth.GROUPS),
        corrections=building.planned,
        block_drop=engine_facts.drops_last_block(vllm_config)
        and not engine_facts.hash_lookahead(vllm_config),
        widens=corrections.widens(building.planned),
        load_window=compat.reaches_load_window(),
        capacity_chunks=engine_facts.capacity_chunks(spec),
        offload_prompt_only=bool(getattr(spec, "offload_prompt_only", True)),
        store_threshold=int(spec.extra_config.get("store_threshold", 0)),
        retention_interval=compat.retention_interval(scheduler.config),
        persistent_tier=engine_facts.persistent_tier(spec),
        lower_tiers=compat.lower_tiers(scheduler),
        hash_seed_fixed=engine_facts.hash_seed_fixed(vllm_config),
    )
