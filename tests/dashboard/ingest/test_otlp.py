from __future__ import annotations

import json

import exports
import factory
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kvlens.dashboard.ingest import otlp
from kvlens.dashboard.ingest.body import BodyError

INFO = factory.engine()
EXPORT = exports.records_export(INFO, [factory.lost_record(n, INFO) for n in range(2)])


def test_both_encodings_say_the_same() -> None:
    from_json = otlp.read_traces(exports.as_json(EXPORT), otlp.JSON)
    foreign = otlp.read_traces(exports.as_protobuf(EXPORT), otlp.PROTOBUF, names=())
    assert [span.attributes for span in foreign[0].spans] == [{}] * len(foreign[0].spans)
    from_protobuf = otlp.read_traces(exports.as_protobuf(EXPORT), otlp.PROTOBUF)
    assert from_json == from_protobuf
    span = from_json[0].spans[0]
    assert (span.name, span.trace_id, span.span_id) == (
        "kv_offload.request",
        f"{1:032x}",
        f"{1:016x}",
    )
    assert span.end_time == pytest.approx(factory.START + 10)


def test_json_as_collectors_write_it() -> None:
    """Numbers for enums and times, upper-case ids, members of a later OTLP, other values."""
    body = json.dumps(
        {
            "resourceSpans": [
                {
                    "schemaUrl": "",
                    "resource": {"attributes": [{"key": "n", "value": {"intValue": "3"}}]},
                    "scopeSpans": [
                        {
                            "scope": {"name": "x"},
                            "spans": [
                                {
                                    "name": "a",
                                    "traceId": "AB" * 16,
                                    "kind": 3,
                                    "status": {"code": 1},
                                    "flags": 257,
                                    "endTimeUnixNano": 5_000_000_000,
                                    "attributes": [
                                        {"key": "s", "value": {"stringValue": "t"}},
                                        {"key": "l", "value": {"arrayValue": {"values": []}}},
                                        {"key": "none"},
                                    ],
                                }
                            ],
                        }
                    ],
                },
                {},
            ]
        }
    ).encode()
    first, second = otlp.read_traces(body, otlp.JSON)
    assert first.attributes == {}
    assert first.spans == [otlp.Span("a", "ab" * 16, "", 5.0, {"s": "t"})]
    assert second == otlp.Resource({}, [])


def test_empty_exports() -> None:
    assert otlp.read_traces(b"{}", otlp.JSON) == []
    assert otlp.read_traces(b"", otlp.PROTOBUF) == []
    otlp.check_metrics(b"{}", otlp.JSON)
    otlp.check_metrics(ExportMetricsServiceRequest().SerializeToString(), otlp.PROTOBUF)


@pytest.mark.parametrize(
    ("body", "media", "message"),
    [
        (b"", otlp.JSON, "not an OTLP JSON trace export: Input data was truncated"),
        (b"[]", otlp.JSON, "Expected `object`, got `array`"),
        (
            b'{"resourceSpans": 1}',
            otlp.JSON,
            r"Expected `array.*`, got `int` - at `\$.res",
        ),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 1}]}]}]}', otlp.JSON, "name"),
        (
            b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"endTimeUnixNano":"now"}]}]}]}',
            otlp.JSON,
            "endTimeUnixNano 'now' is not an integer",
        ),
        (b'{"resourceSpans": ' + b"[" * 100_000, otlp.JSON, "not an OTLP JSON"),
        (b"\xff\xfe", otlp.JSON, "not an OTLP JSON"),
        (b"{}", otlp.PROTOBUF, "not an OTLP protobuf export"),
    ],
)
def test_broken_bodies(body: bytes, media: str, message: str) -> None:
    with pytest.raises(BodyError, match=message) as caught:
        otlp.read_traces(body, media)
    assert caught.value.status == 400


def test_null_is_what_is_left_out() -> None:
    """As senders write it that take the JSON for plain proto3 JSON."""
    for body in (
        b'{"resourceSpans": null}',
        b'{"resourceSpans": [{"resource": null, "scopeSpans": null}]}',
        b'{"resourceSpans": [{"resource": {"attributes": null}, "scopeSpans": [{"spans": null}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": null, "traceId": null, "spanId":'
        b' null, "endTimeUnixNano": null, "attributes": [{"key": null, "value": null}]}]}]}]}',
    ):
        spans = [span for part in otlp.read_traces(body, otlp.JSON) for span in part.spans]
        assert all(span == otlp.Span("", "", "", 0.0, {}) for span in spans)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("00112233445566778899AABBCCDDEEFF", "00112233445566778899aabbccddeeff"),
        ("ABEiM0RVZneImaq7zN3u/w==", "00112233445566778899aabbccddeeff"),
        ("ABEiM0RVZneImaq7zN3u_w==", ""),  # the other alphabet is not what proto3 JSON writes
        ("", ""),
    ],
)
def test_ids_in_hex_and_in_base64(written: str, read: str) -> None:
    body = json.dumps(
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": written}]}]}]}
    ).encode()
    (resource,) = otlp.read_traces(body, otlp.JSON)
    assert resource.spans[0].trace_id == read


def test_broken_metrics() -> None:
    with pytest.raises(BodyError, match="JSON metrics export"):
        otlp.check_metrics(b"{", otlp.JSON)
    with pytest.raises(BodyError, match="protobuf"):
        otlp.check_metrics(b"{", otlp.PROTOBUF)


def test_content_type() -> None:
    assert otlp.content_type("Application/JSON; charset=utf-8") == otlp.JSON
    assert otlp.content_type("application/x-protobuf") == otlp.PROTOBUF
    for header in ("", "text/plain", "application/grpc"):
        with pytest.raises(BodyError, match="use application/x-protobuf or") as caught:
            otlp.content_type(header)
        assert caught.value.status == 415


def test_responses() -> None:
    assert otlp.response(otlp.JSON) == b"{}"
    assert otlp.response(otlp.PROTOBUF) == b""
    assert json.loads(otlp.response(otlp.JSON, 2, "why")) == {
        "partialSuccess": {"rejectedSpans": "2", "errorMessage": "why"}
    }
    answer = ExportTraceServiceResponse.FromString(otlp.response(otlp.PROTOBUF, 2, "why"))
    assert answer.partial_success.rejected_spans == 2
    assert answer.partial_success.error_message == "why"


def test_failures() -> None:
    assert json.loads(otlp.failure(otlp.JSON, 400, "why")) == {"code": 3, "message": "why"}
    status = Status.FromString(otlp.failure(otlp.PROTOBUF, 429, "later"))
    assert (status.code, status.message) == (14, "later")


def test_invalid_text_in_protobuf() -> None:
    message = ExportTraceServiceRequest()
    message.resource_spans.add().scope_spans.add().spans.add(name="ok")
    body = message.SerializeToString().replace(b"ok", b"\xff\xff")
    with pytest.raises(BodyError, match="protobuf"):
        otlp.read_traces(body, otlp.PROTOBUF)
