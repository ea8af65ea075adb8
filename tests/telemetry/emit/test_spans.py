import logging
import threading
from queue import Queue
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recording import SECOND, Engine, engine
from waiting import eventually

from kvlens.telemetry import facts, records, semconv, span_catalog
from kvlens.telemetry.emit import export_queue
from kvlens.telemetry.emit.export_queue import ExportQueue
from kvlens.telemetry.emit.otel import SpanSink

EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(export_queue, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(export_queue, "MAX_PAUSE_SECONDS", 0.02)


def served_request():
    run = Engine()
    run.serve_cold("a-0123abcd", "doc", 130)
    run.add("b-0123abcd", 130, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    run.look("b-0123abcd", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.admit("b-0123abcd", 128, {key for names in run.keys("doc", 130) for key in names})
    run.finish("b-0123abcd", "doc", 130)
    return run.settle()


def test_spans_of_a_request():
    exporter = InMemorySpanExporter()
    exporter.shutdown = lambda: None  # keeps what it has
    sink = SpanSink(engine(), ExportQueue(exporter, "memory", 100))
    cold, served = served_request()
    sink.request(cold)
    sink.request(served)
    sink.close()
    spans = exporter.get_finished_spans()
    by_name = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)

    states = [s.attributes[semconv.ATTR_ENGINE_STATE] for s in by_name[semconv.SPAN_ENGINE]]
    assert states == ["started", "stopped"]
    resource = spans[0].resource.attributes
    assert resource["service.name"] == "kvlens"
    assert records.decode_engine(resource[semconv.ATTR_ENGINE]).incarnation_id == "first"

    root, child_of_client = by_name[semconv.SPAN_REQUEST]
    assert root.parent is None
    assert f"{child_of_client.parent.span_id:016x}" == PARENT
    assert f"{child_of_client.context.trace_id:032x}" == TRACE
    attributes = dict(child_of_client.attributes)
    record = records.decode_record(attributes.pop(semconv.ATTR_RECORD))
    assert (record.request_id, record.trace_id) == ("b", TRACE)
    assert record.span_id == f"{child_of_client.context.span_id:016x}"
    assert attributes == {
        "gen_ai.request.id": "b", "gen_ai.request.model": "tiny", "kvlens.verdict": "full",
        "kvlens.confidence": "certain", "kvlens.tokens.prompt": 130, "kvlens.tokens.local": 0,
        "kvlens.tokens.served": 128, "kvlens.tokens.servable": 128,
        "kvlens.tokens.expected": 128, "kvlens.tokens.lost": 0, "kvlens.tokens.evicted": 0,
        "kvlens.lost_gpu_seconds": 0.0,
    }  # fmt: skip
    assert child_of_client.start_time == int(served.arrival_time * 1e9)
    assert child_of_client.end_time == int(served.finish_time * 1e9)

    lookup = next(
        s for s in by_name[semconv.SPAN_LOOKUP]
        if s.parent.span_id == child_of_client.context.span_id
    )  # fmt: skip
    assert dict(lookup.attributes) == {
        "kvlens.lookup.exit": "served", "kvlens.lookup.attempt": 1, "kvlens.lookup.count": 1,
        "kvlens.tokens.local": 0, "kvlens.groups": (0, 1), "kvlens.groups.width": (8, 2),
        "kvlens.groups.raw_hits": (8, 2), "kvlens.groups.popped": (0, 0),
    }  # fmt: skip
    (load,) = by_name[semconv.SPAN_LOAD]
    assert load.attributes[semconv.ATTR_GROUP_CHUNKS] == (8, 2)
    (store,) = by_name[semconv.SPAN_STORE]
    assert store.parent is None
    assert store.links[0].context.span_id == root.context.span_id


PYTHON_TYPES = {"string": str, "int": int, "double": float, "boolean": bool}


def test_every_attribute_of_every_span_is_documented_with_its_type():
    exporter = InMemorySpanExporter()
    exporter.shutdown = lambda: None
    sink = SpanSink(engine(), ExportQueue(exporter, "memory", 1000))
    run = Engine()
    run.serve_cold("a", "doc", 130)
    every = {key for names in run.keys("doc", 130) for key in names}
    for request, answer, other in (("b", 128, 0), ("c", 0, 0), ("d", 0, 64)):
        run.add(request, 130)
        run.look(request, "doc", 130, answer, [(0, 8, 8), (1, 2, 2 if answer else 0)])
        run.jobs += 1
        job = run.jobs if answer else None
        run.say(facts.ADMITTED, request, answer, job, every, False, 0, other)
        run.say(facts.STARTED, [(request, answer + other)])
        if answer:
            run.say(facts.TRANSFERRED, job, 4096, 0.5)
            run.say(facts.LOADED, every)
        run.finish(request, "doc", 130)
    run.add("e", 130)
    run.look("e", "doc", 130, None, [(0, 8, None)])
    run.now += 2 * SECOND
    for record in run.settle():
        sink.request(record)
    for record in run.kept.deferrals:
        sink.deferral(record)
    sink.close()

    documented = {span.name: {a.name: a for a in span.attributes} for span in span_catalog.SPANS}
    seen = {name: set() for name in documented}
    for span in exporter.get_finished_spans():
        seen[span.name] |= span.attributes.keys()
        for name, value in span.attributes.items():
            known = documented[span.name][name]
            kind = PYTHON_TYPES[known.type.removesuffix("[]")]
            values = value if known.type.endswith("[]") else (value,)
            assert [type(one) for one in values] == [kind] * len(values), (span.name, name)
            assert not known.values or value in known.values
    assert all(seen.values())
    told = {name for names in seen.values() for name in names}
    assert told == {name for attributes in documented.values() for name in attributes}


def test_an_idle_engine_says_that_it_lives():
    flaky = Flaky()
    queue = ExportQueue(flaky, "http://receiver", 100)
    sink = SpanSink(engine(), queue)
    queue.beat(lambda: sink._engine_state(semconv.ENGINE_ALIVE), after=0.0)
    eventually(lambda: flaky.tries >= 3)  # the receiver is away: nothing is piled up
    assert len(queue._queue) <= 2
    flaky.here.set()
    eventually(lambda: len(flaky.taken) >= 3)
    sink.close()
    states = [span.attributes[semconv.ATTR_ENGINE_STATE] for span in flaky.taken]
    assert states == ["started", *["alive"] * (len(states) - 2), "stopped"]
    assert sink.dropped == 0


class Flaky(SpanExporter):
    """A receiver that is away until told otherwise."""

    def __init__(self):
        self.here = threading.Event()
        self.taken = []
        self.tries = 0

    def export(self, spans):
        self.tries += 1
        if not self.here.is_set():
            logging.getLogger(EXPORTER_LOGGER).error("away")
            return SpanExportResult.FAILURE
        self.taken += spans
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.here.set()


def test_spans_wait_for_a_receiver_that_is_away(caplog):
    caplog.set_level(logging.INFO)
    flaky = Flaky()
    queue = ExportQueue(flaky, "http://receiver", 50)
    sink = SpanSink(engine(), queue)
    eventually(lambda: flaky.tries >= 3)
    flaky.here.set()
    eventually(lambda: len(flaky.taken) == 1)
    sink.close()
    assert [s.name for s in flaky.taken] == [semconv.SPAN_ENGINE] * 2
    assert sink.dropped == 0
    lines = [line.getMessage() for line in caplog.records]
    assert lines == [
        "kvlens: http://receiver does not take spans; the newest 50 are kept and retried, "
        "serving is not affected",
        "kvlens: http://receiver takes spans again, 0 dropped",
    ]


class Held(SpanExporter):
    """A receiver that keeps each batch in its hands until it is told what to answer."""

    def __init__(self):
        self.asked = Queue()
        self.answers = Queue()

    def export(self, spans):
        self.asked.put([span.name for span in spans])
        return self.answers.get(timeout=10)


def spans(first, last):
    return [SimpleNamespace(name=f"span {number}") for number in range(first, last + 1)]


@pytest.mark.parametrize("answer", [SpanExportResult.SUCCESS, SpanExportResult.FAILURE])
def test_a_full_queue_drops_the_oldest_and_counts(answer):
    held = Held()
    queue = ExportQueue(held, "http://receiver", 10)
    sink = SpanSink(engine(), queue)  # sends the engine's span
    first = held.asked.get(timeout=10)
    for span in spans(1, 30):
        queue.on_end(span)
    newest = [span.name for span in spans(21, 30)]
    assert [span.name for span in queue._queue] == newest
    assert sink.dropped == 20
    held.answers.put(answer)
    lost = answer is SpanExportResult.FAILURE
    assert held.asked.get(timeout=10) == (first + newest if lost else newest)
    for span in spans(31, 40):
        queue.on_end(span)
    held.answers.put(SpanExportResult.SUCCESS)
    assert held.asked.get(timeout=10) == [span.name for span in spans(31, 40)]
    assert sink.dropped == 20
    for _ in range(3):
        held.answers.put(SpanExportResult.SUCCESS)
    sink.close()


def test_without_a_receiver_there_is_no_sink(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert SpanSink.from_settings(engine(), None, {}, None, 100) is None
