"""vLLM without the connector: what its own metrics tell, and where they end."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.panels import ENGINE, RATE, Panel, Query, board, stock_sum
from grafana.promql import vllm

PER_ENGINE = "{{instance}} · {{engine}}"


def _share(part: str, whole: str) -> Query:
    return Query(f"{stock_sum(part)} / ({stock_sum(whole)} > 0)", PER_ENGINE)


def _quantile(name: str, q: float) -> str:
    rate = vllm(f"{name}_bucket", window=RATE, func="rate", **ENGINE)
    return f"histogram_quantile({q}, sum by (le, instance, engine) ({rate}))"


def build() -> Dashboard:
    """The board."""
    rows = {
        "Is the tier of any use?": [
            Panel("Stored and loaded", "Stores without loads, while the GPU cache evicts: look at "
                  "the runbook of KVOffloadZeroHit. A load series is absent until the first load.",
                  (Query(stock_sum("kv_offload_store_bytes_total"), "stored " + PER_ENGINE),
                   Query(stock_sum("kv_offload_load_bytes_total"), "loaded " + PER_ENGINE)),
                  unit="Bps"),
            Panel("External hits of queries", "Tokens found of tokens asked of the tier.",
                  (_share("external_prefix_cache_hits_total",
                          "external_prefix_cache_queries_total"),),
                  unit="percentunit", maximum=1),
            Panel("Local hits of queries", "Whether prompts have prefixes in common at all.",
                  (_share("prefix_cache_hits_total", "prefix_cache_queries_total"),),
                  unit="percentunit", maximum=1),
        ],
        "Does the GPU cache evict?": [
            Panel("GPU cache usage", "Far below 1 it answers by itself, and no load is due.",
                  (Query(vllm("kv_cache_usage_perc", **ENGINE), PER_ENGINE),), unit="percentunit",
                  maximum=1),
            Panel("Preemptions", "Requests that gave up their GPU cache.",
                  (Query(stock_sum("num_preemptions_total"), PER_ENGINE),)),
            Panel("Requests running and waiting", "Load of the engine.",
                  (Query(vllm("num_requests_running", **ENGINE), "running " + PER_ENGINE),
                   Query(vllm("num_requests_waiting", **ENGINE), "waiting " + PER_ENGINE))),
        ],
        "Time": [
            Panel("Time to first token, median", "What users feel of a reload or of none.",
                  (Query(_quantile("time_to_first_token_seconds", 0.5), PER_ENGINE),), unit="s"),
            Panel("Lookups deferred, 95th percentile", "vLLM's buckets end at 10 s.",
                  (Query(_quantile("kv_offload_lookup_async_delay_seconds", 0.95), PER_ENGINE),),
                  unit="s"),
            Panel("Store allocation failures", "The tier had no slot that it could evict.",
                  (Query(stock_sum("kv_offload_allocation_failure_total"), PER_ENGINE),)),
        ],
    }  # fmt: skip
    return board(
        "stock", "kvlens: vLLM without the connector",
        "Offloading as seen from outside. Which request lost what, and why, needs the connector.",
        rows, of='{__name__=~"vllm[:_]kv_cache_usage_perc"}',
    )  # fmt: skip
