"""Series of connectors and engines other than vLLM's own offloading: name, meaning, finding.

Names are as parsed (a colon is an underscore) and were read in vLLM 0.27.1 to
0.34, LMCache 0.5.6, SGLang 0.5.23 and the KVBM guide of Dynamo 1.1.
``docs/doctor.md`` holds the same table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvlens.dashboard.model.scrape import STORED_ELSEWHERE

ASKED: Final = "external_queries"
HITS: Final = "external_hits"
STORED: Final = STORED_ELSEWHERE
LOADED: Final = "other_loaded"
FAILED: Final = "other_failed"
LOCAL_ASKED: Final = "local_queries"
LOCAL_HITS: Final = "local_hits"
EVICTED: Final = "gpu_evictions"
USAGE: Final = "gpu_usage"
"""A gauge from 0 to 1, the only one here; all others are counters."""

SIMPLE: Final = "SimpleCPUOffloadConnector"
MOONCAKE: Final = "Mooncake store"
LMCACHE: Final = "LMCache"
LMCACHE_SERVER: Final = "LMCache server"
SGLANG: Final = "SGLang HiCache"
KVBM: Final = "KVBM"
UNITS: Final[Mapping[str, str]] = {
    SIMPLE: "chunks", MOONCAKE: "keys", LMCACHE: "tokens", LMCACHE_SERVER: "chunks",
    SGLANG: "tokens", KVBM: "blocks",
}  # fmt: skip
"""What a connector counts its stores and loads in."""
EAGER: Final = frozenset({LMCACHE, LMCACHE_SERVER})
"""These store every full chunk at once: to store nothing needs no full GPU cache to be odd."""
RANKS: Final = frozenset({"worker_id", "tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of workers that all count the same tokens: the largest counts, never the sum."""


@dataclass(frozen=True)
class Series:
    """One series of one system."""

    system: str
    name: str
    counts: str
    """What it is read as: one of the names above."""
    meaning: str
    finding: str
    """Which finding it proves or rules out."""
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Only samples with one of these values count."""


_STORED, _LOST = "`nothing_stored`, `zero_hit`", "`zero_hit`, `low_hits`"
_LOCAL, _FAILED = "reuse, for `zero_hit`", "named in `nothing_stored` and `zero_hit`"
SERIES: Final[tuple[Series, ...]] = (
    Series(SIMPLE, "vllm_simple_kv_offload_save_outcomes_total", STORED,
           "chunks stored (eager mode)", _STORED, {"outcome": frozenset({"stored"})}),
    Series(SIMPLE, "vllm_simple_kv_offload_save_outcomes_total", FAILED,
           "chunks dropped: pool full, request gone, not hashed", _FAILED,
           {"outcome": frozenset({"dropped_cpu_full", "dropped_request_gone",
                                  "dropped_not_hashed"})}),
    Series(SIMPLE, "vllm_simple_kv_offload_load_blocks_total", LOADED, "blocks loaded", _LOST),
    Series(MOONCAKE, "vllm_mooncake_store_operation_keys_total", STORED, "keys put", _STORED,
           {"operation": frozenset({"save_put"})}),
    Series(MOONCAKE, "vllm_mooncake_store_operation_keys_total", LOADED, "keys got", _LOST,
           {"operation": frozenset({"load_get"})}),
    Series(MOONCAKE, "vllm_mooncake_store_operation_failed_keys_total", FAILED, "keys that failed",
           _FAILED),
    Series(LMCACHE, "lmcache_num_lookup_tokens_total", ASKED, "tokens looked up", _LOST),
    Series(LMCACHE, "lmcache_num_lookup_hits_total", HITS, "tokens found", _LOST),
    Series(LMCACHE, "lmcache_num_stored_tokens_total", STORED,
           "tokens stored, evicted ones included", _STORED),
    Series(LMCACHE, "lmcache_num_hit_tokens_total", LOADED, "tokens retrieved", _LOST),
    Series(LMCACHE, "lmcache_local_cpu_evict_failed_count_total", FAILED,
           "evictions that failed, so that a store found no room", _FAILED),
    Series(LMCACHE_SERVER, "lmcache_mp_lookup_requested_tokens_total", ASKED,
           "tokens looked up, in whole chunks", _LOST),
    Series(LMCACHE_SERVER, "lmcache_mp_lookup_hit_tokens_total", HITS,
           "tokens found in L1 or L2", _LOST),
    Series(LMCACHE_SERVER, "lmcache_mp_l1_write_chunks_total", STORED, "chunks written to L1",
           _STORED),
    Series(LMCACHE_SERVER, "lmcache_mp_l1_read_chunks_total", LOADED, "chunks read from L1", _LOST),
    Series(LMCACHE_SERVER, "lmcache_mp_l1_allocation_failure_total", FAILED,
           "stores that found no room", _FAILED),
    Series(SGLANG, "sglang_prompt_tokens_total", LOCAL_ASKED, "prompt tokens", _LOCAL),
    Series(SGLANG, "sglang_cached_tokens_total", LOCAL_HITS, "tokens from the GPU cache", _LOCAL,
           {"cache_source": frozenset({"device"})}),
    Series(SGLANG, "sglang_cached_tokens_total", HITS, "tokens from host or storage", _LOST,
           {"cache_source": frozenset({"host", "storage"})}),
    Series(SGLANG, "sglang_hicache_backup_tokens_total", STORED, "tokens written to host memory",
           _STORED, {"pool": frozenset({"kv", ""})}),
    Series(SGLANG, "sglang_load_back_tokens_total", LOADED, "tokens loaded from host memory",
           _LOST, {"pool": frozenset({"kv", ""})}),
    Series(SGLANG, "sglang_hicache_dropped_tokens_total", FAILED,
           "tokens evicted from the GPU without a copy", _FAILED),
    Series(SGLANG, "sglang_evicted_tokens_total", EVICTED, "tokens evicted from the GPU",
           "that the GPU cache evicts"),
    Series(SGLANG, "sglang_token_usage", USAGE, "use of the GPU cache, 0 to 1",
           "that the GPU cache evicts"),
    Series(KVBM, "kvbm_matched_tokens", HITS, "tokens found in any tier", _LOST),
    Series(KVBM, "kvbm_offload_blocks_d2h", STORED, "blocks written to host memory", _STORED),
    Series(KVBM, "kvbm_offload_blocks_d2d", STORED, "blocks written to disk", _STORED),
    Series(KVBM, "kvbm_offload_blocks_d2o", STORED, "blocks written to object storage", _STORED),
    Series(KVBM, "kvbm_onboard_blocks_h2d", LOADED, "blocks loaded from host memory", _LOST),
    Series(KVBM, "kvbm_onboard_blocks_d2d", LOADED, "blocks loaded from disk", _LOST),
    Series(KVBM, "kvbm_onboard_blocks_o2d", LOADED, "blocks loaded from object storage", _LOST),
    Series(KVBM, "kvbm_object_write_failures", FAILED, "object writes that failed", _FAILED),
)  # fmt: skip
NAMES: Final = frozenset(series.name for series in SERIES)
