"""kvlens' own collectors in vLLM's registry, whatever connector brings the numbers.

No module of vLLM is imported: it hands over the collector classes and the labels.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from kvlens.telemetry.guard import raise_errors
from kvlens.telemetry.semconv import (
    EXEMPLAR_TRACE,
    GROUP_INFO,
    GROUP_LABELS,
    METRICS,
    METRICS_BY_NAME,
    OBSERVER_ERRORS,
    Metric,
)

logger = logging.getLogger(__name__)

Series = tuple[str, Iterable[str], Any]
"""Name of a metric, label values, and what to add, to set or to observe."""


class OwnMetrics:
    """All of kvlens' metrics, with every child that is known at start at 0."""

    def __init__(
        self,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        self._classes = {
            "counter": metric_types[Counter],
            "gauge": metric_types[Gauge],
            "histogram": metric_types[Histogram],
        }
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues
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
        return self._classes[metric.type](
            name=metric.name,
            documentation=metric.help,
            labelnames=[*self._labelnames, *metric.labels],
            **kwargs,
        )

    def _child(self, name: str, values: tuple[str, ...], engine: int) -> Any:
        return self._ours[name].labels(*self.per_engine_labelvalues[engine], *values)

    def observe(self, series: Iterable[Series], engine: int) -> None:
        """Record one engine's numbers; an error of ours never reaches vLLM."""
        try:
            for name, labels, value in series:
                self._observe(METRICS_BY_NAME[name], tuple(labels), value, engine)
        except Exception as error:
            if raise_errors():
                raise
            self._failed(error, engine)

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

    def _observe(self, metric: Metric, labels: tuple[str, ...], value: Any, engine: int) -> None:
        child = self._child(metric.name, labels, engine)
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
            for other in METRICS:
                if other.labels == GROUP_LABELS:
                    self._child(other.name, labels, engine)


_latest: OwnMetrics | None = None


def shared(
    metric_types: Mapping[Any, Any],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[Any]],
) -> OwnMetrics:
    """The collectors of one API server: one set for all connectors that it has.

    ``MultiConnector`` hands the same object of label values to all its children, by
    which they are known. Another object means a new engine: the numbers start anew.
    """
    global _latest
    if _latest is None or _latest.per_engine_labelvalues is not per_engine_labelvalues:
        forget_earlier_engine()
        _latest = OwnMetrics(metric_types, labelnames, per_engine_labelvalues)
    return _latest


def _closed_children(metric: Metric) -> list[tuple[str, ...]]:
    if not metric.labels:
        return [()]
    if len(metric.values) == len(metric.labels) == 1:
        return [(value,) for value in metric.values[0]]
    return []


def forget_earlier_engine() -> None:
    """Unregister our collectors of an engine that ran in this process before.

    vLLM does the same for its own, by their prefix.
    """
    registry = prometheus_client.REGISTRY
    names = {metric.name for metric in METRICS}
    for collector in list(registry._collector_to_names):
        if getattr(collector, "_name", None) in names:
            registry.unregister(collector)
