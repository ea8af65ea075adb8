"""kvlens' metrics through vLLM's ``/metrics``.

Stats travel from the engine to the API server inside vLLM's own stats, under
vLLM's own shape: ``{"types": {name: type}, "data": {name: {labels: value}}}``.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)

from kvlens.connector.observer import raise_errors
from kvlens.telemetry.semconv import (
    EXEMPLAR_TRACE,
    GROUP_INFO,
    GROUP_LABELS,
    METRICS,
    METRICS_BY_NAME,
    OBSERVER_ERRORS,
    Metric,
)
from kvlens.telemetry.sinks.prometheus import Payload

logger = logging.getLogger(__name__)

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
        _forget_earlier_engine()
        self._logged: set[type[Exception]] = set()
        self._ours = {metric.name: self._create(metric) for metric in METRICS}
        for metric in METRICS:
            for engine in per_engine_labelvalues:
                for values in _closed_children(metric):
                    self._child(metric.name, values, engine)

    def _create(self, metric: Metric) -> Any:
        kwargs: dict[str, Any] = {}
        if metric.type == "gauge":
            # With several API servers only the one that has the engine's stats knows the value.
            kwargs["multiprocess_mode"] = "mostrecent"
        elif metric.buckets is not None:
            kwargs["buckets"] = metric.buckets
        factory = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }[metric.type]
        return factory(
            name=metric.name,
            documentation=metric.help,
            labelnames=[*self._labelnames, *metric.labels],
            **kwargs,
        )

    def _child(self, name: str, values: tuple[str, ...], engine: int) -> Any:
        return self._ours[name].labels(*self.per_engine_labelvalues[engine], *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one engine's stats; an error of ours never reaches vLLM."""
        types = transfer_stats_data.get(_TYPES, {})
        data = transfer_stats_data.get(_DATA, {})
        theirs = {name: values for name, values in data.items() if name not in self._ours}
        super().observe({**transfer_stats_data, _TYPES: types, _DATA: theirs}, engine_idx)
        try:
            for name, values in data.items():
                if name in self._ours:
                    self._observe_ours(METRICS_BY_NAME[name], values, engine_idx)
        except Exception as error:
            if raise_errors():
                raise
            self._failed(error, engine_idx)

    def _failed(self, error: Exception, engine: int) -> None:
        """Count an error of ours; log it if it is the first of its kind."""
        with contextlib.suppress(Exception):
            self._child(OBSERVER_ERRORS.name, (), engine).inc()
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error(
                "kvlens could not record its metrics; serving is not affected, more of this kind "
                "are only counted",
                exc_info=error,
            )

    def _observe_ours(self, metric: Metric, values: Any, engine: int) -> None:
        for labels, value in values.items():
            child = self._child(metric.name, tuple(labels), engine)
            if metric.type == "counter":
                child.inc(value)
            elif metric.type == "gauge":
                child.set(value)
            else:
                for sample in value:
                    if isinstance(sample, (list, tuple)):
                        child.observe(sample[0], {EXEMPLAR_TRACE: sample[1]})
                    else:
                        child.observe(sample)
        if metric is GROUP_INFO:
            self._create_group_children(values, engine)

    def _create_group_children(self, groups: Any, engine: int) -> None:
        for metric in METRICS:
            if metric.labels == GROUP_LABELS:
                for labels in groups:
                    self._child(metric.name, tuple(labels), engine)


def _closed_children(metric: Metric) -> list[tuple[str, ...]]:
    if not metric.labels:
        return [()]
    if len(metric.values) == len(metric.labels) == 1:
        return [(value,) for value in metric.values[0]]
    return []


def _forget_earlier_engine() -> None:
    """Unregister our collectors of an engine that ran in this process before.

    vLLM does the same for its own, by their prefix.
    """
    registry = prometheus_client.REGISTRY
    names = {metric.name for metric in METRICS}
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", None) in names:
            registry.unregister(collector)
