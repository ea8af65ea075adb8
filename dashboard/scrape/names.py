"""The metrics of vLLM (0.27 to 0.34) that are read, as they are called once parsed.

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
COMPUTED_LENGTHS: Final = "vllm_request_prefill_kv_computed_tokens_bucket"
"""Tokens computed of each prompt: what no cache gave. The same edges as the prompts' lengths."""
ASYNC_DELAYS: Final = (
    "vllm_kv_offload_lookup_async_delay_seconds",
    "vllm_kv_offload_tiering_lookup_async_delay_seconds",
)
"""The second waits for one tier, the first for the whole answer: never to be added."""
LONGEST_DELAY: Final = 10.0
"""Upper edge of their last finite bucket, in seconds."""
SYNC_DELAYS: Final = "vllm_kv_offload_lookup_sync_delay_seconds"
LONGEST_LOOKUP: Final = 1.0
"""Upper edge of its last finite bucket, in seconds."""
LOAD_SIZES: Final = "vllm_kv_offload_load_size_bucket"
WAITING: Final = "vllm_num_requests_waiting_by_reason"
LABEL_REASON: Final = "reason"
BY_SOURCE: Final = "vllm_prompt_tokens_by_source_total"
LABEL_SOURCE: Final = "source"
NIXL: Final = "vllm_nixl_xfer_time_seconds_count"
NIXL_EXPIRED: Final = "vllm_nixl_num_kv_expired_reqs_total"
"""Of the connector that passes KV from prefill to decode servers."""
PINNED: Final = (
    "vllm_kv_offload_cpu_cache_usage_perc", "vllm_kv_offload_cpu_cache_write_usage_perc",
    "vllm_kv_offload_cpu_cache_read_usage_perc",
)  # fmt: skip
"""What transfers pin just now, in every release from 0.27.1 to 0.34: no occupancy."""
OFFLOADING: Final = (
    *PINNED, f"{SYNC_DELAYS}_count", "vllm_kv_offload_config_info",
    "vllm_kv_offload_allocation_failure_total", "vllm_kv_offload_stores_skipped_total",
    "vllm_kv_offload_cpu_allocation_size_count",
)  # fmt: skip
"""Any of these on a page says that vLLM's offload connector is loaded, though nothing is stored."""

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
    "generated_tokens": ("vllm_generation_tokens_total",),
    "prompts": ("vllm_request_prompt_tokens_count",),
    "prompt_tokens": ("vllm_request_prompt_tokens_sum",),
    "first_tokens": ("vllm_time_to_first_token_seconds_count",),
    "first_token_seconds": ("vllm_time_to_first_token_seconds_sum",),
    "store_jobs": ("vllm_kv_offload_store_size_count",),
    "load_jobs": ("vllm_kv_offload_load_size_count",),
    "stores_skipped": ("vllm_kv_offload_stores_skipped_total",),
    "backpressure_drops": ("vllm_kv_offload_tiering_backpressure_stores_dropped_total",),
    "lookups": (f"{SYNC_DELAYS}_count",),
    "lookup_seconds": (f"{SYNC_DELAYS}_sum",),
    "deferred_lookups": (f"{ASYNC_DELAYS[0]}_count",),
    "allocation_failures": ("vllm_kv_offload_allocation_failure_total",),
    "promotion_failures": (
        "vllm_kv_offload_tiering_promotion_allocation_failures_total",
        "vllm_kv_offload_tiering_promotion_job_failures_total",
    ),
    "promotion_allocation_failures": (
        "vllm_kv_offload_tiering_promotion_allocation_failures_total",
    ),
    "cascade_failures": ("vllm_kv_offload_tiering_cascade_job_failures_total",),
    "tier_queries": ("vllm_kv_offload_tiering_chunk_queries_total",),
    "tier_hits": ("vllm_kv_offload_tiering_chunk_hits_total",),
    "tier_write_bytes": ("vllm_kv_offload_tiering_write_bytes_total",),
    "tier_read_bytes": ("vllm_kv_offload_tiering_read_bytes_total",),
}
"""Counters by what they count; all children of one engine are summed."""
