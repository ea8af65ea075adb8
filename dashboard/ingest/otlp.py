"""OTLP/HTTP trace exports, protobuf or JSON, read into the little that is needed.

OTLP's JSON is not proto3 JSON: ids are hex and enums are numbers. The JSON is
therefore read by types of its own, and ids are lower-case hex from here on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from kvlens.dashboard.ingest.body import BodyError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
CONTENT_TYPES: Final = (PROTOBUF, JSON)
_INVALID_ARGUMENT: Final = 3
_UNAVAILABLE: Final = 14


class Span(NamedTuple):
    """One span; only string attributes are kept."""

    name: str
    trace_id: str
    span_id: str
    end_time: float
    """Unix seconds, 0 when unknown."""
    attributes: dict[str, str]


class Resource(NamedTuple):
    """The spans of one resource."""

    attributes: dict[str, str]
    spans: list[Span]


class _Struct(msgspec.Struct, rename="camel"):
    """JSON object of OTLP; members that are not needed are skipped."""


class _Value(_Struct):
    string_value: str | None = None


class _Attribute(_Struct):
    key: str = ""
    value: _Value | None = None


class _Span(_Struct):
    name: str = ""
    trace_id: str = ""
    span_id: str = ""
    end_time_unix_nano: int | str = 0
    attributes: list[_Attribute] = []


class _ScopeSpans(_Struct):
    spans: list[_Span] = []


class _ResourceAttributes(_Struct):
    attributes: list[_Attribute] = []


class _ResourceSpans(_Struct):
    resource: _ResourceAttributes = msgspec.field(default_factory=_ResourceAttributes)
    scope_spans: list[_ScopeSpans] = []


class _Export(_Struct):
    resource_spans: list[_ResourceSpans] = []


class _MetricsExport(_Struct):
    resource_metrics: list[msgspec.Raw] = []


T = TypeVar("T")
M = TypeVar("M", bound=Message)
_export_decoder = msgspec.json.Decoder(_Export)
_metrics_decoder = msgspec.json.Decoder(_MetricsExport)


def content_type(header: str) -> str:
    """Media type without parameters; raises :class:`BodyError` if it is not OTLP."""
    media = header.partition(";")[0].strip().lower()
    if media not in CONTENT_TYPES:
        raise BodyError(
            415,
            f"Content-Type {media or 'missing'!r} is not OTLP: use {' or '.join(CONTENT_TYPES)}",
        )
    return media


def read_traces(body: bytes, media: str, names: Container[str] | None = None) -> list[Resource]:
    """Parse a trace export; raises :class:`BodyError`.

    Only spans called one of ``names`` (None = all) get their attributes.
    """
    if media == JSON:
        return list(_from_json(_decode(_export_decoder, body, "trace")))
    return list(_from_protobuf(_parse(ExportTraceServiceRequest(), body), names))


def check_metrics(body: bytes, media: str) -> None:
    """Make sure that a metrics export can be read; raises :class:`BodyError`."""
    if media == JSON:
        _decode(_metrics_decoder, body, "metrics")
    else:
        _parse(ExportMetricsServiceRequest(), body)


def response(media: str, rejected: int = 0, message: str = "") -> bytes:
    """Answer to an export; ``rejected`` spans were not taken, ``message`` says why."""
    if media == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": message}
        return msgspec.json.encode({"partialSuccess": partial} if rejected else {})
    answer = ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = message
    return bytes(answer.SerializeToString())


def failure(media: str, status: int, message: str) -> bytes:
    """``google.rpc.Status`` in the encoding of the request, as OTLP wants errors."""
    code = _UNAVAILABLE if status in (429, 503) else _INVALID_ARGUMENT
    if media == JSON:
        return msgspec.json.encode({"code": code, "message": message})
    return bytes(Status(code=code, message=message).SerializeToString())


def _decode(decoder: msgspec.json.Decoder[T], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BodyError(400, f"not an OTLP JSON {what} export: {error}") from error


def _parse(message: M, body: bytes) -> M:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BodyError(400, f"not an OTLP protobuf export: {error}") from error
    return message


def _from_protobuf(
    export: ExportTraceServiceRequest, names: Container[str] | None
) -> Iterator[Resource]:
    for resource in export.resource_spans:
        yield Resource(
            _string_values(resource.resource.attributes),
            [
                Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.end_time_unix_nano / 1e9,
                    _string_values(span.attributes) if names is None or span.name in names else {},
                )
                for scope in resource.scope_spans
                for span in scope.spans
            ],
        )


def _string_values(attributes: Iterable[KeyValue]) -> dict[str, str]:
    return {
        attribute.key: attribute.value.string_value
        for attribute in attributes
        if attribute.value.HasField("string_value")
    }


def _from_json(export: _Export) -> Iterator[Resource]:
    for resource in export.resource_spans:
        yield Resource(
            _strings(resource.resource.attributes),
            [_span(span) for scope in resource.scope_spans for span in scope.spans],
        )


def _span(span: _Span) -> Span:
    return Span(
        span.name,
        span.trace_id.lower(),
        span.span_id.lower(),
        _seconds(span.end_time_unix_nano),
        _strings(span.attributes),
    )


def _seconds(nano: int | str) -> float:
    try:
        return int(nano) / 1e9
    except (ValueError, OverflowError) as error:
        raise BodyError(400, f"endTimeUnixNano {str(nano)[:40]!r} is not an integer") from error


def _strings(attributes: list[_Attribute]) -> dict[str, str]:
    return {
        attribute.key: attribute.value.string_value
        for attribute in attributes
        if attribute.value is not None and attribute.value.string_value is not None
    }
