"""Numbers on their way to vLLM's ``/metrics``.

The drain thread adds, the scheduler thread takes whatever is there with each
engine step. Taking never waits: if the drain thread is adding at that moment,
the numbers leave with the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from kvlens.telemetry import semconv
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Metric
from kvlens.telemetry.sinks import Labels, MetricSink

MAX_SAMPLES = 8_192
"""Histogram samples kept per series until vLLM takes them (none without log stats)."""


@dataclass
class Payload:
    """``types[name]`` and ``data[name][labels]``, the shape of vLLM's offloading stats."""

    types: dict[str, str] = field(default_factory=dict)
    data: dict[str, dict[Labels, Any]] = field(default_factory=dict)

    def series(self, metric: Metric) -> dict[Labels, Any]:
        """Values of a metric by label values."""
        self.types[metric.name] = metric.type
        return self.data.setdefault(metric.name, {})


class StatsSink:
    """Accumulates between two engine steps."""

    def __init__(self, info: EngineInfo) -> None:
        self._lock = Lock()
        self._payload: Payload | None = None
        introduce(info, self)

    def _open(self) -> Payload:
        if self._payload is None:
            self._payload = Payload()
        return self._payload

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        """Add to a counter."""
        with self._lock:
            series = self._open().series(metric)
            series[labels] = series.get(labels, 0) + value

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        """Add one sample to a histogram: the value, or ``(value, trace id)``."""
        with self._lock:
            samples = self._open().series(metric).setdefault(labels, [])
            if len(samples) < MAX_SAMPLES:
                samples.append((value, trace_id) if trace_id else value)

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Set a gauge; the last value before a step counts."""
        with self._lock:
            self._open().series(metric)[labels] = value

    def take(self) -> Payload | None:
        """What was added since the last call; None if nothing, or if adding right now."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            payload, self._payload = self._payload, None
            return payload
        finally:
            self._lock.release()


def introduce(info: EngineInfo, metrics: MetricSink) -> None:
    """Say what the engine is: its configuration, groups and capacity."""
    metrics.gauge(semconv.INFO, 1, info_labels(info))
    for group in info.layout.groups:
        metrics.gauge(semconv.GROUP_INFO, 1, (str(group.kv_group), group.group_kind))
    if info.capacity_chunks is not None:
        metrics.gauge(semconv.CAPACITY_CHUNKS, info.capacity_chunks)


def info_labels(info: EngineInfo) -> Labels:
    """Values of :data:`semconv.INFO`'s labels."""
    corrections = [f"{item.name}={item.state}" for item in info.corrections]
    layout = [f"{g.kv_group}:{g.group_kind}/{g.tokens_per_chunk}" for g in info.layout.groups]
    drafters = [str(g.kv_group) for g in info.layout.groups if g.drafter_used]
    return (
        info.kvlens_version,
        info.vllm_version,
        info.lookup,
        ",".join(corrections),
        ",".join(layout),
        ",".join(drafters),
        str(info.persistent_tier).lower(),
        "fixed" if info.hash_seed_fixed else "random",
        info.depth,
        semconv.TESTED if info.tested else semconv.UNTESTED,
        info.connector,
    )
