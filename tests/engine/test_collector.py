"""Through a real OpenTelemetry Collector to a receiver and to the real dashboard.

Needs a Collector: name it in ``KVLENS_OTELCOL``. It cannot be had everywhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from otlp_receiver import Receiver, receive, values
from recording import Engine, engine

from kvlens.dashboard.demo.engine import free_port, responds
from kvlens.dashboard.demo.process import Supervisor
from kvlens.telemetry import records, semconv
from kvlens.telemetry.assembler import Assembler
from kvlens.telemetry.sinks import otlp
from kvlens.telemetry.sinks.otel import SpanSink
from kvlens.telemetry.sinks.otel_metrics import OtelMetrics

COLLECTOR = os.environ.get("KVLENS_OTELCOL")
pytestmark = pytest.mark.skipif(COLLECTOR is None, reason="no Collector named in KVLENS_OTELCOL")
CONFIG = """
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: 127.0.0.1:{grpc}}}
      http: {{endpoint: 127.0.0.1:{http}}}
processors:
  memory_limiter: {{check_interval: 1s, limit_mib: 512}}
  batch: {{timeout: 200ms}}
exporters:
  otlphttp/kvlens: {{endpoint: "{dashboard}"}}
  otlphttp/other: {{endpoint: "{other}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    traces:
      receivers: [otlp]
      processors: [memory_limiter, batch]
      exporters: [otlphttp/kvlens, otlphttp/other]
    metrics: {{receivers: [otlp], processors: [batch], exporters: [otlphttp/other]}}
"""


@dataclass
class Collector:
    """A running Collector, and what stands behind it."""

    endpoints: dict[str, str]
    """By protocol, as ``otlp_endpoint`` takes them."""
    dashboard: str
    other: Receiver


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder = tmp_path_factory.mktemp("collector")
    ports = {name: free_port() for name in ("grpc", "http", "dashboard")}
    dashboard = f"http://127.0.0.1:{ports['dashboard']}"
    with receive() as other, Supervisor(signals=()) as supervisor:
        command = [
            sys.executable, "-m", "kvlens.dashboard.cli", "serve",
            "--port", str(ports["dashboard"]), "--store", str(folder / "kvlens.db"),
        ]  # fmt: skip
        serving = supervisor.start("dashboard", command, folder / "dashboard.log")
        config = folder / "collector.yaml"
        config.write_text(CONFIG.format(**ports | {"dashboard": dashboard, "other": other.url}))
        assert COLLECTOR is not None
        child = supervisor.start(
            "collector", [COLLECTOR, f"--config={config}"], folder / "collector.log"
        )
        serving.wait_until(lambda: responds(f"{dashboard}/readyz"), 30)
        child.wait_until(lambda: answers(f"http://127.0.0.1:{ports['http']}/v1/traces"), 30)
        endpoints = {
            "http": f"http://127.0.0.1:{ports['http']}",
            "grpc": f"grpc://127.0.0.1:{ports['grpc']}",
        }
        yield Collector(endpoints, dashboard, other)


def answers(url: str) -> bool:
    """Whether anybody answers, if only to complain."""
    try:
        httpx.post(url, timeout=2, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def lose_hits(info: records.EngineInfo, sink: SpanSink) -> None:
    """One request that is stored, and one that gets nothing of it."""
    said = Engine(info)
    said.now = time.time_ns()
    said.assembler = Assembler(info, said.numbers, [sink], wall_offset_ns=0)
    said.serve_cold("a", "doc", 130)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    said.add("lost", 130, headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    said.look("lost", "doc", 130, 0, [(0, 8, 0)])
    said.admit("lost", 0)
    said.finish("lost", "doc", 130)
    said.assembler.flush()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_spans_pass_a_collector_whole(collector: Collector, protocol: str) -> None:
    info = engine(
        engine_id=f"by-{protocol}", incarnation_id=f"by-{protocol}", started_at=time.time()
    )
    sink = SpanSink.from_settings(info, collector.endpoints[protocol], {}, None, 1000)
    assert sink is not None
    lose_hits(info, sink)
    sink.close()
    (span,) = collector.other.wait(
        lambda: [
            span
            for span in collector.other.named(semconv.SPAN_REQUEST, gen_ai__request__id="lost")
            if info.engine_id in values(span.attributes)[semconv.ATTR_RECORD]
        ]
    )
    record = records.decode_record(values(span.attributes)[semconv.ATTR_RECORD])
    assert (record.engine_id, record.lost_tokens) == (info.engine_id, 128)
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"

    def on_the_dashboard() -> Any:
        answer = httpx.get(
            f"{collector.dashboard}/api/v1/requests",
            params={"engine": info.engine_id}, trust_env=False,
        )  # fmt: skip
        return "lost" in answer.raise_for_status().text

    collector.other.wait(on_the_dashboard)


def test_metrics_pass_a_collector(collector: Collector) -> None:
    info = engine()
    for protocol, endpoint in collector.endpoints.items():
        collector.other.metrics.clear()
        to = otlp.receiver(endpoint, "metrics")
        assert to is not None
        metrics = OtelMetrics(info, otlp.metric_exporter(to, {}), to.endpoint)
        metrics.count(semconv.LOST_TOKENS, 128, ("window_veto",))
        metrics.close()
        arrived = collector.other.wait(lambda: collector.other.metrics.get("kvlens.lost_tokens"))
        values_by_cause = {
            values(point.attributes)["cause"]: point.as_int or point.as_double
            for point in arrived.sum.data_points
        }
        assert values_by_cause["window_veto"] == 128, protocol
        assert values_by_cause["capacity"] == 0, protocol
