from recording import engine

from kvlens.telemetry import semconv
from kvlens.telemetry.emit.prometheus import MAX_SAMPLES, StatsSink
from kvlens.telemetry.records import Correction


def test_the_first_payload_names_the_engine_and_its_groups():
    payload = StatsSink(engine()).take()
    assert payload is not None
    assert payload.data[semconv.GROUP_INFO.name] == {
        ("0", "full_attention"): 1, ("1", "mamba"): 1,
    }  # fmt: skip
    assert payload.data[semconv.CAPACITY_CHUNKS.name] == {(): 100}
    (labels,) = payload.data[semconv.INFO.name]
    assert dict(zip(semconv.INFO.labels, labels, strict=True)).items() >= {
        "version": "0", "vllm_version": "0.29.0", "lookup": "corrected", "corrections": "",
        "layout": "0:full_attention/16,1:mamba/64", "drafter_groups": "",
    }.items()  # fmt: skip


def test_the_engines_corrections_are_told_with_their_states():
    info = engine()
    info.corrections = [Correction("load_start", "active"), Correction("pop_widening", "off")]
    payload = StatsSink(info).take()
    assert payload is not None
    (labels,) = payload.data[semconv.INFO.name]
    told = dict(zip(semconv.INFO.labels, labels, strict=True))
    assert told["corrections"] == "load_start=active,pop_widening=off"


def test_numbers_add_up_between_two_takes():
    sink = StatsSink(engine())
    sink.take()
    assert sink.take() is None
    sink.count(semconv.SERVED_TOKENS, 3)
    sink.count(semconv.SERVED_TOKENS, 4)
    sink.count(semconv.LOOKUPS, 1, ("miss",))
    sink.observe(semconv.LOOKUP_SECONDS, 0.5)
    sink.gauge(semconv.RESIDENT_CHUNKS, 1, ("0", "full_attention"))
    sink.gauge(semconv.RESIDENT_CHUNKS, 2, ("0", "full_attention"))
    payload = sink.take()
    assert payload is not None
    assert payload.types == {
        "kvlens_served_tokens": "counter", "kvlens_lookups": "counter",
        "kvlens_lookup_seconds": "histogram", "kvlens_resident_chunks": "gauge",
    }  # fmt: skip
    assert payload.data == {
        "kvlens_served_tokens": {(): 7}, "kvlens_lookups": {("miss",): 1},
        "kvlens_lookup_seconds": {(): [0.5]},
        "kvlens_resident_chunks": {("0", "full_attention"): 2},
    }  # fmt: skip


def test_taking_never_waits():
    sink = StatsSink(engine())
    with sink._lock:
        assert sink.take() is None
    assert sink.take() is not None


def test_samples_are_bounded_when_nobody_takes_them():
    sink = StatsSink(engine())
    for _ in range(MAX_SAMPLES + 10):
        sink.observe(semconv.LOOKUP_SECONDS, 1e-5)
    payload = sink.take()
    assert payload is not None
    assert len(payload.data["kvlens_lookup_seconds"][()]) == MAX_SAMPLES
