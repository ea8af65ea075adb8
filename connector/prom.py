"""kvlens' metrics through vLLM's ``/metrics``.

Stats travel from the engine to the API server inside vLLM's own stats, under
vLLM's own shape: ``{"types": {name: type}, "data": {name: {labels: value}}}``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)

from kvlens.connector import own_metrics
from kvlens.telemetry.emit.prometheus import Payload
from kvlens.telemetry.semconv import METRICS_BY_NAME

_TYPES, _DATA = "types", "data"


class LoggedStats(OffloadingConnectorStats):
    """Stats whose log line leaves kvlens' series out: they are for Prometheus."""

    def reduce(self) -> dict[str, int | float]:
        """vLLM's own values only."""
        # Left out before: a traced sample of ours is a pair, which vLLM could not add up.
        data = {k: v for k, v in self.data[_DATA].items() if k not in METRICS_BY_NAME}
        theirs = OffloadingConnectorStats(data={**self.data, _DATA: data})
        values: dict[str, int | float] = theirs.reduce()
        return values


def merge(stats: Any, payload: Payload | None) -> Any:
    """Add ``payload`` to vLLM's stats of one step; either may be None."""
    if payload is None:
        return stats
    if stats is None:
        stats = OffloadingConnectorStats()  # MultiConnector wants one type for all of a connector's
    stats.data[_TYPES].update(payload.types)
    stats.data[_DATA].update(payload.data)
    return stats


class KVLensPromMetrics(OffloadPromMetrics):
    """vLLM's offload metrics and kvlens' own, created together."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._own = own_metrics.shared(metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one engine's stats; an error of ours never reaches vLLM."""
        types = transfer_stats_data.get(_TYPES, {})
        data = transfer_stats_data.get(_DATA, {})
        theirs = {name: values for name, values in data.items() if name not in METRICS_BY_NAME}
        super().observe({**transfer_stats_data, _TYPES: types, _DATA: theirs}, engine_idx)
        ours = (
            (name, labels, value)
            for name, values in data.items()
            if name in METRICS_BY_NAME
            for labels, value in values.items()
        )
        self._own.observe(ours, engine_idx)
