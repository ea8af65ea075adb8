"""PromQL fragments. Names of kvlens come from ``semconv``, names of vLLM from a checked-in list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Metric

FOLDER: Final = Path(__file__).resolve().parent
VLLM: Final[dict[str, dict[str, Any]]] = json.loads((FOLDER / "vllm_metrics.json").read_text())
"""Samples of vLLM by name without prefix: labels besides model_name and engine, and type."""

ENGINE_LABELS: Final = (s.LABEL_MODEL, s.LABEL_ENGINE)
TARGET_LABELS: Final = ("job", "instance")
"""What Prometheus adds. Rules aggregate with ``without``, so that others of a site stay."""
PER_ENGINE: Final = f"on (job, instance, {s.LABEL_ENGINE})"
PER_TARGET: Final = "on (job, instance)"


def kvlens(metric: Metric, **labels: str) -> str:
    """Selector of a counter's or gauge's samples; label values are regular expressions."""
    return f"{metric.exposed_name}{_matchers(labels)}"


def vllm(name: str, *, window: str = "", offset: str = "", func: str = "", **labels: str) -> str:
    """Selector of a vLLM sample under both names that one may have.

    Prometheus 3 asks for UTF-8 names and gets ``vllm:x``. Prometheus 2 asks for OpenMetrics
    without saying so, and the Python client answers with ``vllm_x``.
    """
    if name not in VLLM:
        raise KeyError(f"{name} is not in vllm_metrics.json")
    span = f"[{window}]" if window else ""
    back = f" offset {offset}" if offset else ""
    sides = [f"{prefix}{name}{_matchers(labels)}{span}{back}" for prefix in ("vllm:", "vllm_")]
    return "(" + " or ".join(f"{func}({side})" if func else side for side in sides) + ")"


def _matchers(labels: dict[str, str]) -> str:
    def one(name: str, value: str) -> str:
        regex = any(mark in value for mark in "$|.*+") and not value.startswith("=")
        return f'{name}{"=~" if regex else "="}"{value.removeprefix("=")}"'

    return "{" + ", ".join(one(*item) for item in labels.items()) + "}" if labels else ""


def without(metric: Metric | tuple[str, ...], expr: str) -> str:
    """Sum that keeps whatever labels a site adds, and drops the metric's own."""
    labels = metric.labels if isinstance(metric, Metric) else metric
    return f"sum without ({', '.join(labels)}) ({expr})" if labels else expr


def rise(metric: Metric, window: str, **labels: str) -> str:
    """Increase of a counter per engine over ``window``."""
    return without(metric, f"increase({kvlens(metric, **labels)}[{window}])")


def any_of(values: tuple[Any, ...]) -> str:
    """Regular expression that matches exactly these values."""
    return "|".join(str(value) for value in values)


def quantile(metric: Metric, q: float, window: str, *, by: str = "", **labels: str) -> str:
    """Quantile of a histogram, per engine or ``by`` labels."""
    rate = f"rate({metric.name}_bucket{_matchers(labels)}[{window}])"
    summed = f"sum by (le, {by}) ({rate})" if by else rate
    return f"histogram_quantile({q}, {summed})"
