"""OTLP/HTTP trace exports, protobuf or JSON, read into the little that is needed.

OTLP's JSON is not proto3 JSON: ids are hex and enums are numbers. The JSON is
therefore read by types of its own, and ids are lower-case hex from here on (base64
from senders that take it for proto3 JSON is read too).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Container, Iterator
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
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from kvlens.dashboard.ingest.body import BodyError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
CONTENT_TYPES: Final = (PROTOBUF, JSON)
MAX_ATTRIBUTES: Final = 512
"""Attributes of one span, or of one resource."""
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
    too_many: bool = False
    """It has over :data:`MAX_ATTRIBUTES`, and none of them is kept."""


class Resource(NamedTuple):
    """The spans of one resource."""

    attributes: dict[str, str]
    spans: list[Span]
    too_many: bool = False
    """It has over :data:`MAX_ATTRIBUTES` of its own, and none of them is kept."""


class _Struct(msgspec.Struct, rename="camel"):
    """JSON object of OTLP; members that are not needed are skipped, null is what is left out."""


class _Value(_Struct):
    string_value: str | None = None


class _Attribute(_Struct):
    key: str | None = None
    value: _Value | None = None


class _Span(_Struct):
    name: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    end_time_unix_nano: int | str | None = 0
    attributes: list[_Attribute] | None = None


class _ScopeSpans(_Struct):
    spans: list[_Span] | None = None


class _ResourceAttributes(_Struct):
    attributes: list[_Attribute] | None = None


class _ResourceSpans(_Struct):
    resource: _ResourceAttributes | None = None
    scope_spans: list[_ScopeSpans] | None = None


class _Export(_Struct):
    resource_spans: list[_ResourceSpans] | None = None


class _MetricsExport(_Struct):
    resource_metrics: list[msgspec.Raw] | None = None


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
        attributes = resource.resource.attributes
        yield Resource(
            _string_values(attributes),
            [
                _read_span(span, names is None or span.name in names)
                for scope in resource.scope_spans
                for span in scope.spans
            ],
            len(attributes) > MAX_ATTRIBUTES,
        )


def _read_span(span: ProtoSpan, wanted: bool) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.end_time_unix_nano / 1e9,
        _string_values(span.attributes) if wanted else {},
        len(span.attributes) > MAX_ATTRIBUTES,
    )


def _string_values(attributes: Collection[KeyValue]) -> dict[str, str]:
    if len(attributes) > MAX_ATTRIBUTES:
        return {}
    return {
        attribute.key: attribute.value.string_value
        for attribute in attributes
        if attribute.value.HasField("string_value")
    }


def _from_json(export: _Export) -> Iterator[Resource]:
    for resource in export.resource_spans or ():
        attributes = (resource.resource and resource.resource.attributes) or []
        yield Resource(
            _strings(attributes),
            [_span(span) for scope in resource.scope_spans or () for span in scope.spans or ()],
            len(attributes) > MAX_ATTRIBUTES,
        )


def _span(span: _Span) -> Span:
    attributes = span.attributes or []
    return Span(
        span.name or "",
        _hex(span.trace_id or ""),
        _hex(span.span_id or ""),
        _seconds(span.end_time_unix_nano or 0),
        _strings(attributes),
        len(attributes) > MAX_ATTRIBUTES,
    )


def _hex(ident: str) -> str:
    """An id as OTLP writes it; some senders write base64, as plain proto3 JSON has it."""
    if len(ident) in (12, 24) and ident.endswith("="):  # 8 or 16 bytes; no hex id has it
        try:
            return base64.b64decode(ident, validate=True).hex()
        except binascii.Error:
            return ""
    return ident.lower()


def _seconds(nano: int | str) -> float:
    try:
        return int(nano) / 1e9
    except (ValueError, OverflowError) as error:
        raise BodyError(400, f"endTimeUnixNano {str(nano)[:40]!r} is not an integer") from error


def _strings(attributes: list[_Attribute]) -> dict[str, str]:
    if len(attributes) > MAX_ATTRIBUTES:
        return {}
    return {
        attribute.key: attribute.value.string_value
        for attribute in attributes
        if attribute.key is not None
        and attribute.value is not None
        and attribute.value.string_value is not None
    }
