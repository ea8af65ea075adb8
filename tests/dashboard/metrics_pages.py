"""Pages of stock vLLM servers, written series by series as vLLM exposes them."""

from __future__ import annotations

GB = 1_000_000_000
LABELS = 'engine="0",model_name="m"'


def page(
    *,
    stored: float | None = None,
    loaded: float | None = None,
    external: tuple[float, float] = (0, 0),
    local: tuple[float, float] = (0, 0),
    usage: float = 0.5,
    started: float = 1_796_000_000,
    deprecated: bool = False,
    labels: str = LABELS,
    **more: float,
) -> str:
    """One page. ``external`` and ``local`` are (queries, hits); None leaves a series out.

    ``more`` are further series by full name, ``vllm:`` as ``vllm_``.
    """
    lines = [
        f"process_start_time_seconds {started}",
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        f"vllm:external_prefix_cache_queries_total{{{labels}}} {external[0]}",
        f"vllm:external_prefix_cache_hits_total{{{labels}}} {external[1]}",
        f"vllm:prefix_cache_queries_total{{{labels}}} {local[0]}",
        f"vllm:prefix_cache_hits_total{{{labels}}} {local[1]}",
        "# TYPE vllm:kv_offload_load_bytes_total counter",
    ]
    if stored is not None:
        lines.append(f"vllm:kv_offload_store_bytes_total{{{labels}}} {stored}")
    if loaded is not None:
        lines.append(f"vllm:kv_offload_load_bytes_total{{{labels}}} {loaded}")
    if deprecated:
        for way, value in (("GPU_to_CPU", stored), ("CPU_to_GPU", loaded)):
            lines.append(
                f'vllm:kv_offload_total_bytes_total{{{labels},transfer_type="{way}"}} {value or 0}'
            )
    lines += [f"{name.replace('vllm_', 'vllm:', 1)}{{{labels}}} {more[name]}" for name in more]
    return "\n".join(lines) + "\n"


def f16() -> tuple[str, str]:
    """Ten minutes, 1 GB/s stored, load bytes absent, 2.1 M queries, no hit, the GPU cache full."""
    before = page(stored=40 * GB, external=(150_000, 0), local=(400_000, 130_000), usage=0.95)
    after = page(stored=640 * GB, external=(2_250_000, 0), local=(4_600_000, 1_500_000), usage=0.97)
    return before, after
