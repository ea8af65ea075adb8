from __future__ import annotations

from typing import Any

import exports
import factory
import msgspec
import pytest

from kvlens.dashboard.ingest import otlp
from kvlens.dashboard.ingest.accept import Accepted, accept
from kvlens.dashboard.store.codec import unpack
from kvlens.telemetry import semconv
from kvlens.telemetry.records import encode

INFO = factory.engine()
RECORD = factory.lost_record(1, INFO)
MAX_JSON = 64 * 1024


def take(data: dict[str, Any], max_json: int = MAX_JSON) -> Accepted:
    return accept(otlp.read_traces(exports.as_json(data), otlp.JSON), max_json)


def rejected(data: dict[str, Any], max_json: int = MAX_JSON) -> str:
    accepted = take(data, max_json)
    assert accepted.batch.rows == []
    assert sum(accepted.rejected.values()) == 1
    return accepted.message


def test_a_request() -> None:
    accepted = take(exports.records_export(INFO, [RECORD]))
    assert accepted.rejected == {}
    assert accepted.batch.engines == [(INFO, RECORD.finish_time)]
    (row,) = accepted.batch.rows
    assert row.record == RECORD
    assert unpack(row.body).decode() == encode(RECORD)


def test_fields_of_a_later_version_are_kept_in_the_body() -> None:
    text = encode(RECORD)[:-1] + ',"later":1}'
    span = exports.span(semconv.SPAN_REQUEST, 1.0, {semconv.ATTR_RECORD: text}, ("", ""))
    (row,) = take(exports.export(INFO, span)).batch.rows
    assert unpack(row.body).decode() == text


def test_a_record_without_trace_id_gets_the_spans() -> None:
    bare = msgspec.structs.replace(RECORD, trace_id="", span_id="")
    (row,) = take(exports.records_export(INFO, [bare])).batch.rows
    assert (row.record.trace_id, row.record.span_id) == (f"{1:032x}", f"{1:016x}")
    assert b'"trace_id":"000' in unpack(row.body)


@pytest.mark.parametrize("span_id", ["x", "AAECAwQFBgc="])
def test_a_span_id_that_is_none_is_not_kept(span_id: str) -> None:
    bare = msgspec.structs.replace(RECORD, trace_id="", span_id="")
    data = exports.records_export(INFO, [bare])
    data["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = span_id
    (row,) = take(data).batch.rows
    assert row.record.span_id == ("" if span_id == "x" else "0001020304050607")


@pytest.mark.parametrize("encode_as", [exports.as_json, exports.as_protobuf])
def test_attributes_are_bounded(encode_as: Any) -> None:
    media = otlp.JSON if encode_as is exports.as_json else otlp.PROTOBUF
    many = [exports.attribute(f"a{n}", "x") for n in range(otlp.MAX_ATTRIBUTES)]
    data = exports.records_export(INFO, [RECORD, factory.lost_record(2, INFO)])
    (resource,) = data["resourceSpans"]
    resource["scopeSpans"][0]["spans"][0]["attributes"] += many
    accepted = accept(otlp.read_traces(encode_as(data), media), MAX_JSON)
    assert [row.record.request_id for row in accepted.batch.rows] == ["cmpl-0002"]
    assert accepted.message == "kv_offload.request has over 512 attributes (1x)"
    resource["resource"]["attributes"] += many
    accepted = accept(otlp.read_traces(encode_as(data), media), MAX_JSON)
    assert accepted.batch.rows == []
    assert accepted.message == "the resource has over 512 attributes (2x)"


def test_engine_start_and_stop() -> None:
    data = exports.export(
        INFO, exports.engine_span("started", INFO.started_at), exports.engine_span("stopped", 9e9)
    )
    batch = take(data).batch
    assert [(event.state, event.time) for event in batch.events] == [
        ("started", INFO.started_at),
        ("stopped", 9e9),
    ]
    assert batch.engines == [(INFO, 9e9)]


def test_a_deferral_is_a_sign_of_life() -> None:
    span = exports.span(semconv.SPAN_DEFERRAL, 2e9, {}, ("", ""))
    accepted = take(exports.export(INFO, span))
    assert (accepted.batch.engines, accepted.batch.rows) == ([(INFO, 2e9)], [])
    assert accepted.ignored == 0


def test_other_spans_are_ignored_and_counted() -> None:
    other = exports.span("llm_request", 1.0, {}, ("", ""))
    lookup = exports.span(semconv.SPAN_LOOKUP, 1.0, {}, ("", ""))
    accepted = take(exports.export(None, other, lookup))
    assert (accepted.ignored, accepted.rejected, any(accepted.batch)) == (2, {}, False)


def test_a_good_span_is_kept_beside_bad_ones() -> None:
    bad = msgspec.structs.replace(RECORD, verdict="fine")
    data = exports.records_export(INFO, [bad, RECORD, bad])
    accepted = take(data)
    assert len(accepted.batch.rows) == 1
    assert accepted.message.endswith("upgrade the dashboard (2x)")


def test_three_reasons_are_told() -> None:
    names = ("prompt_tokens", "local_tokens", "served_tokens", "lost_tokens", "expected_tokens")
    bad = [msgspec.structs.replace(RECORD, **{name: -1}) for name in names]
    accepted = take(exports.records_export(INFO, bad))
    assert sum(accepted.rejected.values()) == 5
    assert accepted.message.endswith("; and 2 other reasons")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"internal_request_id": "x" * 513}, "internal_request_id is longer than 512"),
        ({"incarnation_id": "other"}, "incarnation_id 'other' is not the resource's 'inc-a1'"),
        ({"verdict": "fine"}, "verdict 'fine' is not known here (cold, evicted"),
        ({"cause": "bad luck"}, "cause 'bad luck' is not known here"),
        ({"causes": ["bad luck"]}, "cause 'bad luck' is not known here"),
        ({"finish_time": 1.7e12}, "finish_time is not a time in Unix seconds"),
        ({"arrival_time": 0.0}, "arrival_time is not a time"),
        ({"lost_tokens": 2**41}, "Expected `int` <= 1099511627776 - at `$.lost_tokens`"),
        ({"evicted_tokens": -1}, "Expected `int` >= 0 - at `$.evicted_tokens`"),
        ({"deferral_seconds": 1e300}, "at `$.deferral_seconds`"),
        ({"deferral_seconds": -1.0}, "deferral_seconds or lost_gpu_seconds is negative"),
        ({"resident_chunks": {4096: 1}}, "at `key` in `$.resident_chunks`"),
        ({"sampling_probability": 5e-324}, "sampling_probability is not above 0"),
        ({"sampling_probability": 0.0}, "sampling_probability is not above 0"),
        ({"vetoing_group": 4096}, "Expected `int` <= 4095 - at `$.vetoing_group`"),
        ({"evidence": {"a": [[[[[[[[[1]]]]]]]]]}}, "evidence is nested too deeply"),
        ({"trace_id": "xyz"}, "trace_id 'xyz' is not lower-case hex"),
        ({"schema_version": 99}, "schema version 99, this program reads up to 1"),
    ],
)
def test_bad_records(fields: dict[str, object], message: str) -> None:
    bad = msgspec.structs.replace(RECORD, **fields)
    assert message in rejected(exports.records_export(INFO, [bad]))


def test_a_negative_reload_latency() -> None:
    load = msgspec.structs.replace(factory.served_record(1, INFO).loads[0], latency=-1.0)
    bad = msgspec.structs.replace(RECORD, loads=[load])
    assert "latency of a load is negative" in rejected(exports.records_export(INFO, [bad]))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "has no attribute kvlens.record"),
        ({semconv.ATTR_RECORD: "{"}, "not a kvlens record: Input data was truncated"),
        ({semconv.ATTR_RECORD: "[]"}, "Expected `object`, got `array`"),
        (
            {semconv.ATTR_RECORD: encode(RECORD)[:-1] + ',"evidence":{"a":' + "[" * 20_000},
            "kvlens.record is nested too deeply",
        ),
        ({semconv.ATTR_RECORD: '{"request_id":1}'}, r"Expected `str`, got `int` - at `$.request"),
    ],
)
def test_bad_record_attributes(attributes: dict[str, str], message: str) -> None:
    span = exports.span(semconv.SPAN_REQUEST, 1.0, attributes, ("", ""))
    assert message in rejected(exports.export(INFO, span))


def test_a_record_that_is_too_long() -> None:
    data = exports.records_export(INFO, [RECORD])
    assert "kvlens.record is longer than 2,000" in rejected(data, max_json=2000)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "has no attribute kvlens.engine: keep resource attributes in the collector"),
        (msgspec.structs.replace(INFO, engine_id=""), "engine_id is empty"),
        (msgspec.structs.replace(INFO, started_at=-1.0), "started_at is not a time"),
        (msgspec.structs.replace(INFO, dp_rank=-1), "at `$.dp_rank`"),
        (
            msgspec.structs.replace(INFO, layout=msgspec.structs.replace(INFO.layout, groups=[])),
            "layout has no groups",
        ),
    ],
)
def test_bad_engines(info: Any, message: str) -> None:
    assert message in rejected(exports.export(info, exports.request_span(RECORD)))


def test_that_an_engine_lives_does_not_make_it_busy() -> None:
    batch = take(exports.export(INFO, exports.engine_span("alive", 9e9))).batch
    assert batch.engines == [(INFO, INFO.started_at)]
    assert [event.state for event in batch.events] == ["alive"]


def test_bad_engine_events() -> None:
    assert "kvlens.engine.state is 'paused', not one of started, alive, stopped" in rejected(
        exports.export(INFO, exports.engine_span("paused", 1.0))
    )
    assert "end time of kv_offload.engine is not a time" in rejected(
        exports.export(INFO, exports.engine_span("stopped", 0.0))
    )
