"""Everything that records one engine: its queue, its numbers, its spans and its files."""

from __future__ import annotations

from typing import Any

from kvlens.connector import config
from kvlens.telemetry.emit import otlp
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.emit.otel_metrics import Both, OtelMetrics
from kvlens.telemetry.emit.prometheus import StatsSink
from kvlens.telemetry.flight.recorder import FlightRecorder
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import EngineInfo


class Recording:
    """The recorder of one engine with its sinks; started when it is made."""

    def __init__(self, info: EngineInfo, settings: config.ConnectorSettings) -> None:
        """Start recording; raises :class:`config.ConfigError` for sinks that cannot be."""
        self.stats = StatsSink(info)
        self._otel_metrics = _metrics_by_otlp(info, settings)
        spans = SpanSink.from_settings(
            info,
            endpoint=settings.otlp_endpoint,
            headers=settings.otlp_headers,
            token=settings.ingest_token,
            queue_size=settings.span_queue_size,
        )
        # After the spans, whose ids a record then carries.
        flights = FlightRecorder.from_settings(
            info,
            folder=settings.flight_recorder,
            mode=settings.flight_recorder_mode,
            context=settings.flight_recorder_context,
            max_bytes=settings.flight_recorder_max_bytes,
        )
        metrics: Any = self.stats
        if self._otel_metrics is not None:
            metrics = Both(self.stats, self._otel_metrics)
        self.recorder = Recorder(
            info,
            metrics=metrics,
            sinks=[sink for sink in (spans, flights) if sink is not None],
            queue_size=settings.queue_size,
            sample_rate=settings.sample_rate,
        )
        self.recorder.start()

    def close(self) -> None:
        """Drain and send what is left."""
        self.recorder.close()
        if self._otel_metrics is not None:
            self._otel_metrics.close()


def _metrics_by_otlp(info: EngineInfo, settings: config.ConnectorSettings) -> OtelMetrics | None:
    if not settings.otlp_metrics:
        return None
    to = otlp.receiver(settings.otlp_endpoint, "metrics")
    if to is None:
        raise config.ConfigError(
            "kvlens connector setting otlp_metrics: there is no receiver to send to; set "
            "otlp_endpoint as well"
        )
    headers = otlp.with_token(settings.otlp_headers, settings.ingest_token)
    return OtelMetrics(info, otlp.metric_exporter(to, headers), to.endpoint)
