"""Where OTLP goes, and metrics that go there."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from recording import Engine, engine

from kvlens.telemetry import semconv
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.emit import otel_metrics, otlp
from kvlens.telemetry.emit.otel_metrics import Both, OtelMetrics
from kvlens.telemetry.emit.otlp import OtlpError, Receiver
from kvlens.telemetry.emit.prometheus import StatsSink

TRACES, ROOT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (None, {}, None),
        ("http://a:1/", {}, Receiver("http://a:1/v1/traces")),
        ("http://a:1/v1/traces", {TRACES: "http://b"}, Receiver("http://a:1/v1/traces")),
        ("grpc://a:4317", {}, Receiver("a:4317", grpc=True)),
        ("grpcs://a:4317", {}, Receiver("a:4317", grpc=True, secure=True)),
        (None, {ROOT: "http://b"}, Receiver("http://b/v1/traces")),
        (None, {ROOT: "http://b:4317"}, Receiver("b:4317", grpc=True)),
        (None, {TRACES: "http://c/x"}, Receiver("http://c/x")),
        # As vLLM sets it, and takes it.
        (None, {TRACES: "http://c:9"}, Receiver("c:9", grpc=True)),
        (None, {TRACES: "c:4317"}, Receiver("c:4317", grpc=True)),
        (None, {ROOT: "https://b:1", PROTOCOL: "grpc"}, Receiver("b:1", grpc=True, secure=True)),
        (None, {TRACES: "http://c:4317", PROTOCOL: "http/protobuf"}, Receiver("http://c:4317")),
    ],
)
def test_where_spans_go(monkeypatch, setting, environment, expected):
    for name in (TRACES, ROOT, PROTOCOL, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert otlp.receiver(setting) == expected


def test_metrics_go_beside_the_spans():
    for setting in ("http://a:1", "http://a:1/v1/traces"):
        assert otlp.receiver(setting, "metrics") == Receiver("http://a:1/v1/metrics")


@pytest.mark.parametrize("setting", ["a:4318", "ftp://a", "http://", "grpc://"])
def test_what_is_no_receiver_is_refused(setting):
    with pytest.raises(OtlpError, match="otlp_endpoint"):
        otlp.receiver(setting)


def test_the_exporters_are_of_the_receivers_protocol():
    headers = otlp.with_token({"x-tenant": "a"}, "secret")
    assert headers == {"x-tenant": "a", "authorization": "Bearer secret"}
    for make in (otlp.span_exporter, otlp.metric_exporter):
        over_http = make(Receiver("http://127.0.0.1:1/v1/x"), headers)
        assert ".http." in type(over_http).__module__
        over_http.shutdown()
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
        over_grpc = make(Receiver("127.0.0.1:1", grpc=True), headers)
        assert ".grpc." in type(over_grpc).__module__
        over_grpc.shutdown()


class Receiving(MetricExporter):
    """Keeps exports; fails or hangs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[Any] = []
        self.result = MetricExportResult.SUCCESS
        self.seen = threading.Condition()

    def export(self, metrics_data, timeout_millis=10_000, **kwargs):
        with self.seen:
            self.exports.append(metrics_data)
            self.seen.notify_all()
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter").error("away")
        return self.result

    def force_flush(self, timeout_millis=10_000):
        return True

    def shutdown(self, timeout_millis=30_000, **kwargs):
        self.exports.append("shut down")


def points(metrics_data):
    return {
        metric.name: (metric.unit, list(metric.data.data_points))
        for resource in metrics_data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_the_numbers_are_those_of_the_metrics_page():
    exporter, stats, info = Receiving(), StatsSink(engine()), engine()
    metrics = OtelMetrics(info, exporter, "memory", every_seconds=60)
    said = Engine(info)
    said.assembler = Assembler(info, Both(stats, metrics), [said.kept], wall_offset_ns=0)
    said.serve_cold("a", "doc", 130)
    said.settle()
    metrics.observe(semconv.RELOAD_LATENCY, 0.2, trace_id=TRACE)
    metrics.close()
    assert exporter.exports.pop() == "shut down"
    found = points(exporter.exports[-1])
    requests = {p.attributes["verdict"]: p.value for p in found["kvlens.requests"][1]}
    assert requests == {str(v): int(v == "cold") for v in semconv.Verdict}
    stored = {p.attributes["kv_group"]: p.value for p in found["kvlens.stored_chunks"][1]}
    assert stored == {"0": 8, "1": 2}
    assert found["kvlens.capacity_chunks"][1][0].value == 100
    (resource,) = exporter.exports[-1].resource_metrics
    assert resource.resource.attributes[semconv.ATTR_SERVICE_INSTANCE] == info.incarnation_id
    unit, (latency,) = found["kvlens.reload_latency"]
    assert (unit, latency.count, latency.explicit_bounds) == ("s", 1, semconv.TRANSFER_BUCKETS)
    assert [f"{e.trace_id:032x}" for e in latency.exemplars] == [TRACE]
    numbers = stats.take().data
    assert numbers["kvlens_requests"] == {("cold",): 1}
    assert numbers["kvlens_stored_chunks"][("0", "full_attention")] == 8


def test_a_receiver_that_is_away_costs_one_line(caplog):
    exporter = Receiving()
    exporter.result = MetricExportResult.FAILURE
    metrics = OtelMetrics(engine(), exporter, "http://receiver", every_seconds=0.01)
    with exporter.seen:
        assert exporter.seen.wait_for(lambda: len(exporter.exports) >= 5, timeout=10)
        exporter.result = MetricExportResult.SUCCESS
        assert exporter.seen.wait_for(lambda: len(exporter.exports) >= 10, timeout=10)
    metrics.close()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1
    assert "http://receiver does not take metrics" in lines[0]
    assert not [record for record in caplog.records if record.getMessage() == "away"]


def test_a_receiver_that_hangs_holds_up_neither_counting_nor_the_end(monkeypatch):
    monkeypatch.setattr(otel_metrics, "_CLOSE_SECONDS", 0.05)
    entered, never = threading.Event(), threading.Event()

    class Hanging(Receiving):
        def export(self, metrics_data, timeout_millis=10_000, **kwargs):
            entered.set()
            never.wait()
            return MetricExportResult.FAILURE

    metrics = OtelMetrics(engine(), Hanging(), "http://receiver", every_seconds=0.01)
    assert entered.wait(20)
    for _ in range(1000):
        metrics.count(semconv.SERVED_TOKENS, 1)
        metrics.observe(semconv.LOOKUP_SECONDS, 1e-5, trace_id=TRACE)
    metrics.close()
    assert metrics._thread.is_alive()
    assert not never.is_set()
    never.set()
    metrics._thread.join(20)
    assert not metrics._thread.is_alive()
