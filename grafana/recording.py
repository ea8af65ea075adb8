"""Recording rules, named ``level:metric:operation``: one series per engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from grafana.promql import kvlens, vllm, without
from kvlens.telemetry import semconv as s

BURN_WINDOWS: Final = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
STOCK_WINDOW: Final = "10m"
STOCK_HISTORY: Final = "6h"
"""How far back a stock engine's local hits show that prompts come back."""


@dataclass(frozen=True)
class Recorded:
    """One recording rule; ``labels`` are those besides target's and engine's."""

    record: str
    expr: str
    labels: tuple[str, ...] = ()

    def rule(self) -> dict[str, Any]:
        """As in a rule file."""
        return {"record": self.record, "expr": self.expr}


def served(window: str) -> str:
    """Name of the rate of served tokens per engine."""
    return f"engine:kvlens_served_tokens:rate{window}"


def servable(window: str) -> str:
    """Name of the rate of servable tokens per engine."""
    return f"engine:kvlens_servable_tokens:rate{window}"


def unserved(window: str) -> str:
    """Name of the share of servable tokens that was not served; absent without demand."""
    return f"engine:kvlens_unserved_tokens:ratio_rate{window}"


def stock(name: str, window: str = STOCK_WINDOW) -> str:
    """Name of the rise of a vLLM counter per engine."""
    return f"engine:vllm_{name}:increase{window}"


def burn() -> list[Recorded]:
    """Served against servable, over every window of the burn rate."""
    rules = []
    for window in BURN_WINDOWS:
        due, got = servable(window), served(window)
        rules += [
            Recorded(due, f"rate({kvlens(s.SERVABLE_TOKENS)}[{window}])"),
            Recorded(got, f"rate({kvlens(s.SERVED_TOKENS)}[{window}])"),
            Recorded(unserved(window), f"clamp_min(1 - {got} / ({due} > 0), 0)"),
        ]
    return rules


def traffic() -> list[Recorded]:
    """What boards ask for often."""
    group = (s.LABEL_GROUP, s.LABEL_KIND)
    lost = without((), f"rate({kvlens(s.LOST_TOKENS)}[5m])")
    return [
        Recorded("engine_cause:kvlens_lost_tokens:rate5m", lost, (s.LABEL_CAUSE,)),
        Recorded(
            "engine:kvlens_resident_chunks:sum",
            without(s.RESIDENT_CHUNKS, kvlens(s.RESIDENT_CHUNKS)),
        ),
        Recorded(
            "engine_group:kvlens_pops:rate5m", f"rate({kvlens(s.POPS)}[5m])", group
        ),
    ]  # fmt: skip


def _grown(name: str, **labels: str) -> str:
    """Rise of a counter that vLLM creates with its first event, which is not lost here.

    ``increase`` sees nothing of a series that begins at 10 MB and stays there.
    """
    now = vllm(name, **labels)
    rise = vllm(name, window=STOCK_WINDOW, func="increase", **labels)
    return f"({rise} > 0) or ({now} unless {vllm(name, offset=STOCK_WINDOW, **labels)}) or {rise}"


def stock_engines() -> list[Recorded]:
    """Rises of vLLM's own counters; flat byte counters, else the deprecated ones, never both."""
    deprecated = "kv_offload_total_bytes_total"
    transfer = ("transfer_type",)
    rules = [
        Recorded(
            stock(f"kv_offload_{side}_bytes"),
            f"{_grown(f'kv_offload_{side}_bytes_total')} or "
            f"{without(transfer, _grown(deprecated, transfer_type=way))}",
        )
        for side, way in (("store", "GPU_to_CPU"), ("load", "CPU_to_GPU"))
    ]
    for name, sample, drop in (
        ("external_queries", "external_prefix_cache_queries_total", ()),
        ("external_hits", "external_prefix_cache_hits_total", ()),
        ("local_queries", "prefix_cache_queries_total", ()),
        ("local_hits", "prefix_cache_hits_total", ()),
        ("preemptions", "num_preemptions_total", ()),
        ("gpu_evictions", "kv_block_idle_before_evict_seconds_count", ()),
        ("allocation_failures", "kv_offload_allocation_failure_total", ()),
        ("store_jobs", "kv_offload_store_size_count", ()),
    ):
        rules.append(
            Recorded(stock(name), without(drop, vllm(sample, window=STOCK_WINDOW, func="increase")))
        )
    for name, sample in (
        ("local_queries", "prefix_cache_queries_total"),
        ("local_hits", "prefix_cache_hits_total"),
        ("preemptions", "num_preemptions_total"),
    ):
        expr = vllm(sample, window=STOCK_HISTORY, func="increase")
        rules.append(Recorded(stock(name, STOCK_HISTORY), expr))
    rules.append(
        Recorded(
            "engine:vllm_kv_cache_usage:max10m",
            vllm("kv_cache_usage_perc", window=STOCK_WINDOW, func="max_over_time"),
        )
    )
    return rules


def groups() -> list[dict[str, Any]]:
    """Groups of the recording rule file."""
    return [
        {"name": name, "rules": [item.rule() for item in rules]}
        for name, rules in (
            ("kvlens-served-tokens", burn()),
            ("kvlens-traffic", traffic()),
            ("kvlens-stock-engines", stock_engines()),
        )
    ]


def recorded() -> dict[str, tuple[str, ...]]:
    """Labels of each recorded series, besides target's and engine's."""
    return {item.record: item.labels for item in (*burn(), *traffic(), *stock_engines())}
