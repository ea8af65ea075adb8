"""The metrics of vLLM (0.27 to 0.33) that are read, as they are called once parsed.

A colon is an underscore here: under OpenMetrics the client renames ``vllm:x``.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "vllm_"
LABEL_ENGINE: Final = "engine"
LABEL_MODEL: Final = "model_name"
LABEL_TRANSFER: Final = "transfer_type"
LABEL_LE: Final = "le"

STARTED: Final = "process_start_time_seconds"
CACHE_CONFIG: Final = "vllm_cache_config_info"
GPU_USAGE: Final = ("vllm_kv_cache_usage_perc", "vllm_gpu_cache_usage_perc")
"""The second is what vLLM called it before the first; a page may have both."""
CREATED: Final = "vllm_prefix_cache_queries_created"
"""Tells the start of a server where :data:`STARTED` is missing."""
PROMPT_LENGTHS: Final = "vllm_request_prompt_tokens_bucket"
ASYNC_DELAYS: Final = "vllm_kv_offload_lookup_async_delay_seconds"
LONGEST_DELAY: Final = 10.0
"""Upper edge of its last finite bucket, in seconds."""

STORE_BYTES: Final = "vllm_kv_offload_store_bytes_total"
LOAD_BYTES: Final = "vllm_kv_offload_load_bytes_total"
DEPRECATED_BYTES: Final = "vllm_kv_offload_total_bytes_total"
"""Counts the same bytes as the two above, by :data:`LABEL_TRANSFER`: never to be added."""
STORE_TRANSFER: Final = "GPU_to_CPU"
LOAD_TRANSFER: Final = "CPU_to_GPU"

COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "external_queries": ("vllm_external_prefix_cache_queries_total",),
    "external_hits": ("vllm_external_prefix_cache_hits_total",),
    "local_queries": ("vllm_prefix_cache_queries_total",),
    "local_hits": ("vllm_prefix_cache_hits_total",),
    "preemptions": ("vllm_num_preemptions_total",),
    "gpu_evictions": ("vllm_kv_block_idle_before_evict_seconds_count",),
    "requests": ("vllm_request_success_total",),
    "store_jobs": ("vllm_kv_offload_store_size_count",),
    "allocation_failures": ("vllm_kv_offload_allocation_failure_total",),
    "promotion_failures": (
        "vllm_kv_offload_tiering_promotion_allocation_failures_total",
        "vllm_kv_offload_tiering_promotion_job_failures_total",
    ),
    "cascade_failures": ("vllm_kv_offload_tiering_cascade_job_failures_total",),
    "tier_queries": ("vllm_kv_offload_tiering_chunk_queries_total",),
    "tier_hits": ("vllm_kv_offload_tiering_chunk_hits_total",),
    "tier_write_bytes": ("vllm_kv_offload_tiering_write_bytes_total",),
    "tier_read_bytes": ("vllm_kv_offload_tiering_read_bytes_total",),
}
"""Counters by what they count; all children of one engine are summed."""
