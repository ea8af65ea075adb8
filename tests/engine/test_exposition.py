"""What a real server tells Prometheus and OpenTelemetry, read by their own parsers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import NEWEST, Server, serve
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import IdGenerator, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from otlp_receiver import Receiver, receive, values
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import Supervisor
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import records, semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=4, rounds=1, prompt_tokens=1100, output_tokens=4, vocab=model.TINY.vocab)
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}
TRACED = "traced"
CLIENT_SPAN = "client"


def ask(server: Server, document: int, request_id: str, **headers: str) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={
            "model": engine.MODEL_NAME,
            "prompt": PLAN.prompt(document),
            "temperature": 0,
            "max_tokens": PLAN.output_tokens,
        },
        headers={"X-Request-Id": request_id, **headers},
        timeout=120,
        trust_env=False,
    )
    answer.raise_for_status()


class OneTrace(IdGenerator):
    """Ids that exemplars can be compared with."""

    def generate_trace_id(self) -> int:
        return int(TRACE, 16)

    def generate_span_id(self) -> int:
        return int(CLIENT, 16)


@contextmanager
def client_span(receiver: Receiver | None) -> Iterator[dict[str, str]]:
    """A client's own span and the headers that it sends on; exported if there is a receiver."""
    provider = TracerProvider(id_generator=OneTrace(), shutdown_on_exit=False)
    if receiver is not None:
        exporter = OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces")
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    headers: dict[str, str] = {}
    with provider.get_tracer("client").start_as_current_span(CLIENT_SPAN):
        TraceContextTextMapPropagator().inject(headers)
        yield headers
    provider.shutdown()


def play(server: Server, receiver: Receiver | None = None) -> None:
    """Four documents, then the first again, under a client's span; one server each."""
    for document in range(PLAN.documents):
        ask(server, document, f"cold-{document}")
    with client_span(receiver) as headers:
        ask(server, 0, TRACED, **headers)
    server.flush(PLAN.documents + 1)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receive() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kvlens = {"otlp_endpoint": receiver.url, "otlp_metrics": True}
    folder = tmp_path_factory.mktemp("exposition")
    with serve(
        NEWEST,
        tiny_model,
        folder,
        kvlens,
        arguments=("--otlp-traces-endpoint", f"{receiver.url}/v1/traces"),
        env={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "300",
        },
    ) as running:
        check_children_at_start(page(running))
        play(running, receiver)
        yield running


def page(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics", trust_env=False).raise_for_status().text


def openmetrics_page(server: Server) -> str:
    """vLLM's ``/metrics`` is text whatever is accepted; with a slash it negotiates."""
    answer = httpx.get(f"{server.url}/metrics/", headers=OPENMETRICS, trust_env=False)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return answer.raise_for_status().text


def ours(openmetrics: str) -> str:
    """Our families: vLLM's own have two of one name, which the parser refuses."""
    lines = openmetrics.splitlines(keepends=True)
    return "".join(line for line in lines if "kvlens_" in line.split("{")[0]) + "# EOF\n"


def check_children_at_start(text: str) -> None:
    """Every series with closed labels is there, at 0, before the first request."""
    samples = {
        (sample.name, *(sample.labels[label] for label in metric.labels)): sample.value
        for family in parse_text(text)
        for sample in family.samples
        if (metric := semconv.METRICS_BY_NAME.get(family.name)) is not None
    }
    for metric in semconv.METRICS:
        if metric.labels and len(metric.values) != 1:
            continue
        name = metric.exposed_name + ("_count" if metric.type == "histogram" else "")
        for labels in [(value,) for value in metric.values[0]] if metric.labels else [()]:
            assert samples[(name, *labels)] == 0 or metric.type == "gauge", (name, labels)


@pytest.fixture(scope="module")
def two_servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two-servers")
    with serve(NEWEST, tiny_model, folder, {}, arguments=("--api-server-count", "2")) as running:
        play(running)
        yield running


def check_values(families: Any) -> None:
    found = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("kvlens_") and set(sample.labels) <= {"model_name", "engine"}
    }
    assert found["kvlens_served_tokens_total"] == found["kvlens_servable_tokens_total"] == 1024
    assert found["kvlens_reload_latency_seconds_count"] == 1
    assert found["kvlens_prefill_tokens_per_second"] > 0
    assert found["kvlens_observer_errors_total"] == 0


@pytest.mark.parametrize("which", ["server", "two_servers"])
def test_both_expositions_are_read_by_the_official_parsers(
    which: str, request: pytest.FixtureRequest
) -> None:
    running: Server = request.getfixturevalue(which)
    check_values(parse_text(page(running)))
    check_values(parse_openmetrics(ours(openmetrics_page(running))))
    for metric in semconv.METRICS:
        if metric.labels == semconv.GROUP_LABELS:
            name = metric.exposed_name + ("_count" if metric.type == "histogram" else "")
            assert running.metric(name, kv_group="0") is not None, name
    violations = semconv.IDENTITY_VIOLATIONS.exposed_name
    assert running.metric(violations) == 0
    sources = semconv.PROMPT_TOKENS.exposed_name
    assert running.metric(sources, source="offload") == 1024
    assert running.metric(semconv.TIER_TOKENS.exposed_name, tier="host") == 1024


def test_an_exemplar_leads_from_the_reload_to_its_trace(server: Server) -> None:
    exemplars = {
        family.name: {sample.exemplar.labels[semconv.EXEMPLAR_TRACE]}
        for family in parse_openmetrics(ours(openmetrics_page(server)))
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars[semconv.RELOAD_LATENCY.name] == {TRACE}
    assert exemplars[semconv.LOOKUP_SECONDS.name] == {TRACE}


def scrape_job(name: str, path: str, *servers: Server) -> dict[str, Any]:
    targets = [httpx.URL(running.url).netloc.decode() for running in servers]
    return {"job_name": name, "metrics_path": path, "static_configs": [{"targets": targets}]}


def test_a_real_prometheus_scrapes_it(server: Server, two_servers: Server, tmp_path: Path) -> None:
    prometheus = shutil.which(os.environ.get("KVLENS_TEST_PROMETHEUS", "prometheus"))
    if prometheus is None:
        pytest.skip("no prometheus: make setup installs it where it may")
    jobs = [
        # The negotiated page of one server, the plain one of both.
        scrape_job("openmetrics", "/metrics/", server),
        scrape_job("text", "/metrics", server, two_servers),
    ]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = engine.free_port()
    command = [
        prometheus,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    api = f"http://127.0.0.1:{port}/api/v1"

    def query(what: str, **parameters: str) -> Any:
        answer = httpx.get(f"{api}/{what}", params=parameters, trust_env=False)
        return answer.raise_for_status().json()["data"]

    with Supervisor(signals=()) as supervisor:
        child = supervisor.start("prometheus", command, tmp_path / "log")
        child.wait_until(lambda: engine.responds(f"http://127.0.0.1:{port}/-/ready"), 30)
        served = "kvlens_served_tokens_total"
        child.wait_until(lambda: len(query("query", query=served)["result"]) == 3, 30)
        assert {r["value"][1] for r in query("query", query=served)["result"]} == {"1024"}
        assert {t["health"] for t in query("targets")["activeTargets"]} == {"up"}
        kinds = {
            m: query("metadata", metric=m)[m][0]["type"]
            for m in ("kvlens_reload_latency_seconds", "kvlens_info")
        }
        assert kinds == {"kvlens_reload_latency_seconds": "histogram", "kvlens_info": "gauge"}
        (found,) = query(
            "query_exemplars",
            query="kvlens_reload_latency_seconds_bucket",
            start="0",
            end="9999999999",
        )
        assert found["exemplars"][0]["labels"] == {semconv.EXEMPLAR_TRACE: TRACE}


def test_spans_join_the_clients_trace(server: Server, receiver: Receiver) -> None:
    (span,) = receiver.wait(
        lambda: receiver.named(semconv.SPAN_REQUEST, gen_ai__request__id=f"cmpl-{TRACED}-0")
    )
    theirs = receiver.wait(
        lambda: [s for s in receiver.named("llm_request") if s.trace_id == span.trace_id]
    )[0]
    (client,) = receiver.named(CLIENT_SPAN)
    assert span.trace_id == theirs.trace_id == client.trace_id
    assert span.parent_span_id == theirs.parent_span_id == client.span_id
    assert (client.trace_id.hex(), client.span_id.hex()) == (TRACE, CLIENT)
    assert client.start_time_unix_nano <= span.start_time_unix_nano
    attributes = values(span.attributes)
    assert attributes["gen_ai.request.id"] == values(theirs.attributes)["gen_ai.request.id"]
    record = records.decode_record(attributes.pop(semconv.ATTR_RECORD))
    assert record.local_tokens + record.served_tokens + record.computed_tokens == 1100
    assert record.tier_tokens == {"host": 1024}
    assert record.lost_gpu_seconds == 0
    kinds = {name: type(value) for name, value in attributes.items()}
    assert kinds == {
        "gen_ai.request.id": str,
        "gen_ai.request.model": str,
        "kvlens.verdict": str,
        "kvlens.confidence": str,
        "kvlens.tokens.prompt": int,
        "kvlens.tokens.local": int,
        "kvlens.tokens.served": int,
        "kvlens.tokens.servable": int,
        "kvlens.tokens.expected": int,
        "kvlens.tokens.lost": int,
        "kvlens.tokens.computed": int,
        "kvlens.tokens.evicted": int,
        "kvlens.lost_gpu_seconds": float,
    }
    children = [s for s in list(receiver.spans) if s.parent_span_id == span.span_id]
    assert {child.name for child in children} == {semconv.SPAN_LOOKUP, semconv.SPAN_LOAD}
    lookup = values(next(c for c in children if c.name == semconv.SPAN_LOOKUP).attributes)
    assert all(isinstance(n, int) for n in lookup[semconv.ATTR_GROUP_WIDTHS])


def test_metrics_go_by_otlp_as_well(server: Server, receiver: Receiver) -> None:
    served = receiver.wait(
        lambda: (
            receiver.metrics.get("kvlens.served_tokens")
            if any(
                p.as_int == 1024 for p in receiver.metrics["kvlens.served_tokens"].sum.data_points
            )
            else None
        )
    )
    assert (served.unit, served.sum.is_monotonic) == ("{token}", True)
    latency = receiver.metrics["kvlens.reload_latency"].histogram.data_points[0]
    assert latency.count == 1
    assert tuple(latency.explicit_bounds) == semconv.TRANSFER_BUCKETS
