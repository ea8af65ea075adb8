"""``POST /v1/…`` of a real server."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exports
import factory
import httpx
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kvlens.dashboard.model.batch import Appended, Batch
from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.sqlite import SqliteStore

INFO = factory.engine()
JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
GZIP = {"Content-Encoding": "gzip"}


def lost(*indexes: int) -> dict[str, Any]:
    return exports.records_export(INFO, [factory.lost_record(n, INFO) for n in indexes])


@pytest.mark.parametrize(
    ("headers", "encode"),
    [
        (JSON, exports.as_json),
        (PROTOBUF, exports.as_protobuf),
        ({**JSON, **GZIP}, lambda data: gzip.compress(exports.as_json(data))),
        ({**PROTOBUF, **GZIP}, lambda data: gzip.compress(exports.as_protobuf(data))),
    ],
)
def test_all_encodings_are_stored_and_answered_in_kind(
    client: httpx.Client, headers: dict[str, str], encode: Callable[[dict[str, Any]], bytes]
) -> None:
    for _ in range(2):  # the same batch twice is stored once
        answer = client.post("/v1/traces", content=encode(lost(0, 1)), headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (
            200,
            headers["Content-Type"],
        )
        assert answer.content == (b"{}" if headers["Content-Type"] == JSON["Content-Type"] else b"")
    assert len(client.get("/api/v1/requests").json()["requests"]) == 2
    metrics = client.get("/metrics").text
    assert "kvlens_dashboard_records_total 2.0" in metrics
    assert "kvlens_dashboard_duplicate_records_total 2.0" in metrics


def test_partial_success(client: httpx.Client) -> None:
    data = exports.export(
        INFO,
        exports.request_span(factory.lost_record(1, INFO)),
        exports.span("kv_offload.request", 1.0, {"kvlens.record": "{"}, ("", "")),
        exports.span("llm_request", 1.0, {}, ("", "")),
    )
    answer = client.post("/v1/traces", content=exports.as_json(data), headers=JSON)
    assert answer.status_code == 200
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert partial["errorMessage"].startswith("not a kvlens record: Input data was truncated")
    answer = client.post("/v1/traces", content=exports.as_protobuf(data), headers=PROTOBUF)
    message = ExportTraceServiceResponse.FromString(answer.content)
    assert message.partial_success.rejected_spans == 1
    metrics = client.get("/metrics").text
    assert "kvlens_dashboard_rejected_spans_total 2.0" in metrics
    assert "kvlens_dashboard_ignored_spans_total 2.0" in metrics


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (415, {"Content-Type": "text/plain"}, b"{}", "use application/x-protobuf or application/j"),
        (415, {**JSON, "Content-Encoding": "zstd"}, b"{}", "'zstd' is not supported: use gzip"),
        (400, JSON, b"{", "not an OTLP JSON trace export"),
        (400, {**JSON, **GZIP}, b"{}", "not gzip"),
    ],
)
def test_refusals(
    client: httpx.Client, status: int, headers: dict[str, str], body: bytes, message: str
) -> None:
    answer = client.post("/v1/traces", content=body, headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["message"]


def test_a_refusal_in_protobuf(client: httpx.Client) -> None:
    answer = client.post("/v1/traces", content=b"{}", headers=PROTOBUF)
    assert answer.status_code == 400
    assert "not an OTLP protobuf" in Status.FromString(answer.content).message


def test_limits(settings: Settings) -> None:
    small = settings.model_copy(update={"max_body_bytes": 1024, "max_decompressed_bytes": 2048})
    with running(small) as url:
        plain = httpx.post(f"{url}/v1/traces", content=bytes(1025), headers=JSON)
        chunks = (bytes(512) for _ in range(9))
        chunked = httpx.post(f"{url}/v1/traces", content=chunks, headers=JSON)
        packed = gzip.compress(bytes(2049))
        bomb = httpx.post(f"{url}/v1/traces", content=packed, headers={**JSON, **GZIP})
        metrics = httpx.post(f"{url}/v1/metrics", content=packed, headers={**JSON, **GZIP})
    assert [plain.status_code, chunked.status_code] == [413, 413]
    assert "KVLENS_MAX_BODY_BYTES" in plain.json()["message"]
    assert [bomb.status_code, metrics.status_code] == [413, 413]
    assert "KVLENS_MAX_DECOMPRESSED_BYTES" in bomb.json()["message"]


def test_metrics_exports_are_acknowledged(client: httpx.Client) -> None:
    answer = client.post("/v1/metrics", content=b'{"resourceMetrics":[{}]}', headers=JSON)
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert client.post("/v1/metrics", content=b"", headers=PROTOBUF).status_code == 200
    assert client.post("/v1/metrics", content=b"[", headers=JSON).status_code == 400
    assert "kvlens_dashboard_metric_exports_total 2.0" in client.get("/metrics").text


def test_a_full_queue_says_when_to_come_back(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    append = SqliteStore.append

    def gated(self: SqliteStore, batches: Sequence[Batch]) -> Appended:
        entered.set()
        gate.wait(10)
        return append(self, batches)

    monkeypatch.setattr(SqliteStore, "append", gated)
    one = settings.model_copy(update={"queue_batches": 1})
    with running(one) as url, ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url) as client:
        body = exports.as_json(lost(1))
        first = pool.submit(httpx.post, f"{url}/v1/traces", content=body, headers=JSON)
        assert entered.wait(10)
        busy = client.post("/v1/traces", content=exports.as_json(lost(2)), headers=JSON)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert busy.json()["message"] == "the dashboard's queue is full: send again later"
        gate.set()
        assert first.result(10).status_code == 200
        again = client.post("/v1/traces", content=exports.as_json(lost(2)), headers=JSON)
        assert again.status_code == 200
        assert "kvlens_dashboard_backpressure_total 1.0" in client.get("/metrics").text
        assert len(client.get("/api/v1/requests").json()["requests"]) == 2


def test_a_store_that_fails_is_not_acknowledged(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: SqliteStore, batches: Sequence[Batch]) -> Appended:
        raise OSError("disk full")

    with running(settings) as url, monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "append", fail)
        answer = httpx.post(f"{url}/v1/traces", content=exports.as_json(lost(1)), headers=JSON)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"code": 14, "message": "the batch was not stored: disk full"}


def test_nothing_is_written_outside_the_store(client: httpx.Client, tmp_path: Path) -> None:
    client.post("/v1/traces", content=exports.as_json(lost(1)), headers=JSON)
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"kvlens.db", "kvlens.db-wal", "kvlens.db-shm", "kvlens.db.lock"}
