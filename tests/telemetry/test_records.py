import msgspec
import pytest
from recording import Engine, engine

from kvlens.telemetry import records, semconv
from kvlens.telemetry.records import RecordError, Store


def one_record():
    run = Engine()
    run.serve_cold("a", "doc", 130)
    return run.settle()[0]


def test_a_record_survives_the_wire():
    record = one_record()
    assert records.decode_record(records.encode(record)) == record
    info = engine()
    assert records.decode_engine(records.encode(info)) == info


def test_every_field_is_on_the_wire_even_when_zero():
    wire = msgspec.json.decode(records.encode(one_record()))
    assert wire["served_tokens"] == 0
    assert wire["lookups"][0]["groups"][0]["popped"] == 0
    assert wire["cause"] is None


def test_a_large_record_is_cut_to_its_limit_and_says_so():
    record = one_record()
    record.lookups = record.lookups * 500
    record.stores = [Store(time=1.0)] * 2000
    text = records.encode_bounded(record)
    assert len(text.encode()) <= semconv.RECORD_MAX_BYTES
    slim = records.decode_record(text)
    assert slim.truncated
    assert slim.lookups[-1] == record.lookups[-1]
    assert slim.verdict == record.verdict
    assert not record.truncated


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", "not a kvlens record"),
        ("[]", "Expected `object`"),
        ('{"request_id": "a"}', "missing required field"),
        (b"\xff", "not a kvlens record"),
    ],
)
def test_what_is_no_record_is_refused(data, says):
    with pytest.raises(RecordError, match=says):
        records.decode_record(data)


def test_a_newer_schema_is_refused_with_what_to_do():
    newer = msgspec.structs.replace(one_record(), schema_version=semconv.SCHEMA_VERSION + 1)
    with pytest.raises(RecordError, match="upgrade kvlens"):
        records.decode_record(records.encode(newer))


def test_unknown_fields_of_a_later_release_are_ignored():
    wire = msgspec.json.decode(records.encode(one_record()))
    wire["mood"] = "good"
    assert records.decode_record(msgspec.json.encode(wire)).request_id == "a"
