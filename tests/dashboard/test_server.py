"""The whole dashboard as a process, fed by the OTLP exporter that engines use."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import exports
import factory
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.server import ServeError, running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry import semconv
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.records import encode

INFO = factory.engine()
SERVE = """
import sys
from kvlens.dashboard.server import run
from kvlens.dashboard.settings import load_settings
run(load_settings(store=sys.argv[1], port=0))
"""


@contextmanager
def process(store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The dashboard in a process of its own; yields it and its URL."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(store)], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        url = child.stderr.readline().split()[2]
        try:
            while True:
                try:
                    httpx.get(f"{url}/readyz", timeout=10).raise_for_status()
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            yield child, url
        finally:
            child.kill()


def test_the_real_exporter(client: httpx.Client) -> None:
    exporter = OTLPSpanExporter(
        endpoint=str(client.base_url.join("/v1/traces")), compression=Compression.Gzip, timeout=10
    )
    provider = TracerProvider(resource=Resource({semconv.ATTR_ENGINE: encode(INFO)}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer(semconv.SCOPE_NAME)
    records = [factory.lost_record(n, INFO) for n in range(600)]  # more than one batch
    for record in records:
        span = tracer.start_span(semconv.SPAN_REQUEST)
        span.set_attribute(semconv.ATTR_RECORD, encode(record))
        span.set_attribute(semconv.ATTR_LOST_TOKENS, record.lost_tokens)
        span.end()
    assert provider.force_flush()
    provider.shutdown()
    metrics = client.get("/metrics").text
    assert "kvlens_dashboard_records_total 600.0" in metrics
    assert "kvlens_dashboard_rejected_spans_total 0.0" in metrics
    assert client.get("/api/v1/requests/cmpl-0599").json()["request"]["verdict"] == "lost"


def test_the_connectors_own_sink(client: httpx.Client) -> None:
    sink = SpanSink.from_settings(INFO, str(client.base_url), {}, None, 1000)
    assert sink is not None
    for index in range(3):
        sink.request(factory.lost_record(index, INFO))
    sink.deferral(factory.lost_record(3, INFO))  # still in flight: not a finished request
    sink.close()
    # Acknowledged only when detection of the sink's last export is done.
    again = exports.as_json(exports.records_export(INFO, [factory.lost_record(0, INFO)]))
    headers = {"Content-Type": "application/json"}
    client.post("/v1/traces", content=again, headers=headers).raise_for_status()
    engine = client.get("/api/v1/engines/inc-a1").json()
    assert (engine["state"], engine["totals"]["requests"]) == ("gone", {"lost": 3})
    (incident,) = client.get("/api/v1/incidents").json()["incidents"]
    assert (incident["close_reason"], incident["requests"]) == ("engine_gone", 3)
    record = client.get("/api/v1/requests/cmpl-0001").json()["request"]
    assert len(record["trace_id"]) == 32


def test_acknowledged_batches_survive_kill(tmp_path: Path) -> None:
    """Several senders at full speed, then kill -9: whatever was acknowledged is there."""
    store = tmp_path / "kvlens.db"
    acknowledged: list[int] = []
    enough = Event()

    def sender(url: str, start: int) -> None:
        headers = {"Content-Type": "application/x-protobuf"}
        with httpx.Client(base_url=url, timeout=10) as client:
            for index in range(start, start + 1000):
                data = exports.records_export(INFO, [factory.cold_record(index, INFO)])
                try:
                    answer = client.post(
                        "/v1/traces", content=exports.as_protobuf(data), headers=headers
                    )
                except httpx.TransportError:
                    return
                if answer.status_code == 200:
                    acknowledged.append(index)
                if len(acknowledged) >= 60:
                    enough.set()

    with process(store) as (child, url):
        threads = [Thread(target=sender, args=(url, n * 1000)) for n in range(3)]
        for thread in threads:
            thread.start()
        assert enough.wait(60)
        child.kill()
        for thread in threads:
            thread.join()
    opened = SqliteStore(str(store))
    stored = opened.requests(RequestQuery(limit=5000)).records
    opened.close()
    assert set(acknowledged) <= {int(record.request_id.removeprefix("cmpl-")) for record in stored}


def test_kill_and_restart_keep_the_incident(tmp_path: Path) -> None:
    store = tmp_path / "kvlens.db"
    headers = {"Content-Type": "application/json"}

    def send(url: str, *indexes: int) -> None:
        records = [factory.lost_record(n, INFO) for n in indexes]
        body = exports.as_json(exports.records_export(INFO, records))
        httpx.post(f"{url}/v1/traces", content=body, headers=headers).raise_for_status()

    with process(store) as (child, url):
        send(url, 0, 1)
        send(url, 2)
        child.kill()
    with process(store) as (_, url):
        send(url, 3)
        send(url, 3)  # detection of the first is done when the second is acknowledged
        (incident,) = httpx.get(f"{url}/api/v1/incidents").json()["incidents"]
    assert (incident["state"], incident["requests"]) == ("open", 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with (
        process(tmp_path / "kvlens.db") as (child, url),
        httpx.stream("GET", f"{url}/api/v1/stream", timeout=10) as response,
    ):
        next(response.iter_lines())
        os.kill(child.pid, number)
        assert child.wait(10) == (0 if number == signal.SIGINT else -number)
    assert not (tmp_path / "kvlens.db-wal").exists()  # checkpointed and closed


def test_a_busy_port_is_named(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = settings.model_copy(update={"port": port})
        message = rf"127\.0\.0\.1:{port}: Address already in use; choose another"
        with pytest.raises(ServeError, match=message), running(busy):
            pass


def test_a_store_in_use_is_named(settings: Settings, client: httpx.Client) -> None:
    assert client.get("/healthz").status_code == 200
    with pytest.raises(StoreError, match="in use by another dashboard"), running(settings):
        pass


def test_a_host_that_does_not_exist(settings: Settings) -> None:
    nowhere = settings.model_copy(update={"host": "256.0.0.1"})
    with pytest.raises(ServeError, match=r"cannot listen on 256\.0\.0\.1"), running(nowhere):
        pass


def test_ipv6(settings: Settings) -> None:
    with running(settings.model_copy(update={"host": "::1"})) as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/healthz").text == "ok\n"
