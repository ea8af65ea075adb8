"""The same numbers as on ``/metrics``, by OTLP: for those who scrape nothing.

Fed on the drain thread; collected and exported on a thread of its own, so that
a receiver that hangs or is away costs one log line and nothing else. Numbers
are cumulative: what an export misses the next one has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
)
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvlens.telemetry import semconv
from kvlens.telemetry.emit.otlp import THREAD_NAME, hush
from kvlens.telemetry.emit.prometheus import introduce
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Metric
from kvlens.telemetry.sinks import Labels, MetricSink

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 10.0
_CLOSE_SECONDS = 3.0


class Both:
    """Hands every number to two sinks."""

    def __init__(self, first: MetricSink, second: MetricSink) -> None:
        self._sinks = (first, second)

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        """Add to a counter."""
        for sink in self._sinks:
            sink.count(metric, value, labels)

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        """Add one sample to a histogram."""
        for sink in self._sinks:
            sink.observe(metric, value, labels, trace_id)

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Set a gauge."""
        for sink in self._sinks:
            sink.gauge(metric, value, labels)


class OtelMetrics:
    """OpenTelemetry instruments for every metric, named ``Metric.otel_name``."""

    def __init__(
        self,
        info: EngineInfo,
        exporter: MetricExporter,
        receiver: str,
        every_seconds: float = EXPORT_SECONDS,
    ) -> None:
        hush()
        self._reader = _Reader(exporter, receiver)
        self._provider = MeterProvider(
            metric_readers=[self._reader],
            resource=Resource.create(
                {
                    semconv.ATTR_SERVICE_NAME: semconv.SERVICE_NAME,
                    semconv.ATTR_SERVICE_VERSION: info.kvlens_version,
                    semconv.ATTR_SERVICE_INSTANCE: info.incarnation_id,
                    semconv.ATTR_ENGINE_ID: info.engine_id,
                    semconv.ATTR_DP_RANK: info.dp_rank,
                    semconv.ATTR_GEN_AI_MODEL: info.model,
                }
            ),
            views=[
                View(
                    instrument_name=metric.otel_name,
                    aggregation=ExplicitBucketHistogramAggregation(list(metric.buckets)),
                )
                for metric in semconv.METRICS
                if metric.buckets is not None
            ],
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter(semconv.SCOPE_NAME, info.kvlens_version)
        make: dict[str, Callable[..., Any]] = {
            "counter": meter.create_counter,
            "gauge": meter.create_gauge,
            "histogram": meter.create_histogram,
        }
        self._instruments = {
            metric.name: make[metric.type](metric.otel_name, metric.unit, metric.help)
            for metric in semconv.METRICS
        }
        self._attributes: dict[tuple[str, Labels], dict[str, str]] = {}
        self._start_at_0(info)
        introduce(info, self)
        self._stop = Event()
        self._every = every_seconds
        self._thread = Thread(target=self._run, name=f"{THREAD_NAME}-metrics", daemon=True)
        self._thread.start()

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        """Add to a counter."""
        self._instruments[metric.name].add(value, self._labelled(metric, labels))

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        """Add one sample to a histogram; with ``trace_id``, an exemplar may be made of it."""
        context = _context(trace_id) if trace_id else None
        self._instruments[metric.name].record(value, self._labelled(metric, labels), context)

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Set a gauge."""
        self._instruments[metric.name].set(value, self._labelled(metric, labels))

    def close(self) -> None:
        """Export once more, within a few seconds."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    def _labelled(self, metric: Metric, labels: Labels) -> dict[str, str]:
        key = (metric.name, labels)
        attributes = self._attributes.get(key)
        if attributes is None:
            attributes = dict(zip(metric.labels, labels, strict=True))
            self._attributes[key] = attributes
        return attributes

    def _start_at_0(self, info: EngineInfo) -> None:
        groups = [(str(group.kv_group), group.group_kind) for group in info.layout.groups]
        for metric in semconv.METRICS:
            if metric.type == "counter":
                for labels in children(metric, groups):
                    self.count(metric, 0, labels)

    def _run(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stop.wait(self._every)
            try:
                self._reader.collect()
            except Exception:
                logger.exception("kvlens: metrics could not be collected")
        self._provider.shutdown()


def children(metric: Metric, groups: Sequence[Labels]) -> list[Labels]:
    """Label values of a metric that are known from the start."""
    if not metric.labels:
        return [()]
    if metric.labels == semconv.GROUP_LABELS:
        return list(groups)
    return [(value,) for value in metric.values[0]] if len(metric.values) == 1 else []


def _context(trace_id: str) -> Context:
    """A context from which the SDK takes an exemplar's trace; the span is not known here."""
    span = SpanContext(int(trace_id, 16), 1, False, TraceFlags(TraceFlags.SAMPLED))
    return trace.set_span_in_context(NonRecordingSpan(span), Context())


class _Reader(MetricReader):
    def __init__(self, exporter: MetricExporter, receiver: str) -> None:
        super().__init__()
        self._exporter = exporter
        self._receiver = receiver
        self._away = False

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> None:
        try:
            sent = self._exporter.export(metrics_data) is MetricExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - an exporter must not end this thread
            logger.debug("kvlens: export failed: %s", error)
            sent = False
        if sent and self._away:
            logger.info("kvlens: %s takes metrics again", self._receiver)
        elif not sent and not self._away:
            logger.warning(
                "kvlens: %s does not take metrics; they are cumulative and sent again, serving is "
                "not affected",
                self._receiver,
            )
        self._away = not sent

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._exporter.shutdown()
