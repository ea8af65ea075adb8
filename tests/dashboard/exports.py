"""OTLP exports as a connector sends them, as JSON or protobuf."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvlens.telemetry import semconv
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode


def attribute(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def span(name: str, end_time: float, attributes: dict[str, str], ids: tuple[str, str]) -> Any:
    return {
        "name": name,
        "kind": 1,
        "traceId": ids[0],
        "spanId": ids[1],
        "endTimeUnixNano": str(int(end_time * 1e9)),
        "attributes": [attribute(key, value) for key, value in attributes.items()],
    }


def request_span(record: RequestRecord) -> Any:
    attributes = {semconv.ATTR_RECORD: encode(record)}
    ids = (f"{1:032x}", f"{1:016x}")
    return span(semconv.SPAN_REQUEST, record.finish_time, attributes, ids)


def engine_span(state: str, at: float) -> Any:
    attributes = {semconv.ATTR_ENGINE_STATE: state}
    return span(semconv.SPAN_ENGINE, at, attributes, (f"{2:032x}", f"{2:016x}"))


def resource_spans(info: EngineInfo | None, spans: Sequence[Any]) -> Any:
    attributes = [] if info is None else [attribute(semconv.ATTR_ENGINE, encode(info))]
    return {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}


def export(info: EngineInfo | None, *spans: Any) -> dict[str, Any]:
    return {"resourceSpans": [resource_spans(info, spans)]}


def records_export(info: EngineInfo, records: Sequence[RequestRecord]) -> dict[str, Any]:
    return export(info, *map(request_span, records))


def as_json(data: dict[str, Any]) -> bytes:
    return json.dumps(data).encode()


def as_protobuf(data: dict[str, Any]) -> bytes:
    message = ExportTraceServiceRequest()
    for resource in data["resourceSpans"]:
        target = message.resource_spans.add()
        _attributes(target.resource.attributes, resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            scope_target = target.scope_spans.add()
            for item in scope["spans"]:
                made = scope_target.spans.add(
                    name=item["name"],
                    trace_id=bytes.fromhex(item["traceId"]),
                    span_id=bytes.fromhex(item["spanId"]),
                    end_time_unix_nano=int(item["endTimeUnixNano"]),
                )
                _attributes(made.attributes, item["attributes"])
    return message.SerializeToString()


def _attributes(target: Any, source: list[dict[str, Any]]) -> None:
    for item in source:
        target.add(key=item["key"]).value.string_value = item["value"]["stringValue"]
