"""Through collectors that are not ours, to a receiver and to the real dashboard.

Rotel comes with the test environment. The OpenTelemetry Collector cannot be had
everywhere: name it in ``KVLENS_OTELCOL``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_receiver import Receiver, receive, values
from recording import Engine, engine

from kvlens.dashboard.demo.engine import free_port, responds
from kvlens.dashboard.demo.process import Supervisor
from kvlens.telemetry import records, semconv
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.emit import otlp
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.emit.otel_metrics import OtelMetrics

OTELCOL = os.environ.get("KVLENS_OTELCOL")
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
      exporters: [otlphttp/kvlens]
    metrics: {{receivers: [otlp], processors: [batch], exporters: [otlphttp/other]}}
"""
ROTEL = {
    "ROTEL_OTLP_GRPC_ENDPOINT": "127.0.0.1:{grpc}",
    "ROTEL_OTLP_HTTP_ENDPOINT": "127.0.0.1:{http}",
    "ROTEL_EXPORTERS": "kvlens:otlp,other:otlp",
    "ROTEL_EXPORTERS_TRACES": "kvlens",
    "ROTEL_EXPORTERS_METRICS": "other",
    "ROTEL_EXPORTER_KVLENS_ENDPOINT": "{dashboard}",
    "ROTEL_EXPORTER_KVLENS_PROTOCOL": "http",
    "ROTEL_EXPORTER_OTHER_ENDPOINT": "{other}",
    "ROTEL_EXPORTER_OTHER_PROTOCOL": "http",
}
"""The same, as Rotel takes it."""
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Collector:
    """A running collector, and what stands behind it."""

    endpoints: dict[str, str]
    """By protocol, as ``otlp_endpoint`` takes them."""
    dashboard: str
    """Where its traces go."""
    other: Receiver
    """Where its metrics go."""


def started(which: str, folder: Path, where: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a collector."""
    if which == "otelcol":
        if OTELCOL is None:
            pytest.skip("no OpenTelemetry Collector named in KVLENS_OTELCOL")
        config = folder / "collector.yaml"
        config.write_text(CONFIG.format(**where))
        return [OTELCOL, f"--config={config}"], {}
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("rotel has no package for this machine")
    agent = Path(found.origin).with_name("rotel-agent")
    return [str(agent), "start"], {name: value.format(**where) for name, value in ROTEL.items()}


@pytest.fixture(scope="module", params=["rotel", "otelcol"])
def collector(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Collector]:
    folder = tmp_path_factory.mktemp("collector")
    ports = {name: free_port() for name in ("grpc", "http", "dashboard")}
    dashboard = f"http://127.0.0.1:{ports['dashboard']}"
    with receive() as other, Supervisor(signals=()) as supervisor:
        where = ports | {"dashboard": dashboard, "other": other.url}
        command, variables = started(request.param, folder, where)
        serve = [
            sys.executable,
            "-m",
            "kvlens.dashboard.cli",
            "serve",
            "--port",
            str(ports["dashboard"]),
            "--store",
            str(folder / "kvlens.db"),
        ]
        serving = supervisor.start("dashboard", serve, folder / "dashboard.log")
        child = supervisor.start(request.param, command, folder / "collector.log", variables)
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
    said.add("lost", 130, headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"})
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

    def on_the_dashboard() -> Any:
        answer = httpx.get(
            f"{collector.dashboard}/api/v1/requests",
            params={"engine": info.engine_id, "verdict": "lost"},
            trust_env=False,
        )
        return answer.raise_for_status().json()["requests"]

    (found,) = collector.other.wait(on_the_dashboard)
    record = records.decode_record(json.dumps(found))
    assert (record.request_id, record.verdict, record.lost_tokens) == ("lost", "lost", 128)
    assert (record.trace_id, record.parent_span_id) == (TRACE, CLIENT)
    assert record.lookups[0].groups[0].width == 8


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
