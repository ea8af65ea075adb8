"""Whatever breaks, the scheduler's side of a real Recorder returns and other sinks get all.

No test here measures time: what hangs is released, if ever, only after the calls
that must not wait for it have returned.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from flights import ids, recorder
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from recording import MS, SECOND, Kept, Numbers, engine, layout
from waiting import eventually

from kvlens.telemetry import facts, guard, semconv
from kvlens.telemetry.assembly import assembler, emission
from kvlens.telemetry.emit import export_queue
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.flight import recorder as flight_recorder
from kvlens.telemetry.recorder import Recorder


@pytest.fixture(autouse=True)
def production(monkeypatch):
    """Contain errors of ours, as outside tests."""
    monkeypatch.setattr(guard, "raise_errors", lambda: False)


def serve(made, count, arrival=time.time, headers=None):
    """What the scheduler thread does for ``count`` requests."""
    keys = [([], 0) for _ in layout().groups]
    for number in range(count):
        request, now = f"r{number}-0123abcd", time.monotonic_ns()
        made.append((facts.ADDED, now, request, arrival(), 130, headers, False, None))
        made.append((facts.LOOKUP, now, request, now + MS, 0, 130, 0, [], keys, False, None, None))
        made.append((facts.ADMITTED, now, request, 0, None, ()))
        made.append((facts.FINISHED, now, request, "stop", 131, 130, keys))


def broken(name):
    """A sink that raises in one of its methods, or from one of its properties."""

    def fail(self, *args):
        raise RuntimeError(f"{name} is broken")

    made = Kept()
    made.__class__ = type("Broken", (Kept,), {name: property(fail) if "drop" in name else fail})
    return made


@pytest.mark.parametrize("where", ["request", "dropped", "close"])
def test_a_sink_that_raises_costs_the_others_nothing(where, caplog):
    before, after, numbers = Kept(), Kept(), Numbers()
    made = Recorder(engine(), numbers, [before, broken(where), after])
    made.start()
    serve(made, 5)
    made.close()
    assert [len(sink.requests) for sink in (before, after)] == [5, 5]
    assert (before.closed, after.closed) == (True, True)
    errors = numbers.counters.get((semconv.OBSERVER_ERRORS.name, ()), 0)
    assert errors == {"request": 5, "dropped": 5, "close": 1}[where]
    said = [line for line in caplog.records if "serving is not affected" in line.message]
    assert len(said) == min(errors, 1)


def test_a_deferral_that_a_sink_cannot_take_reaches_the_others_and_is_judged_anew(monkeypatch):
    kept = Kept()
    made = Recorder(engine(), Numbers(), [broken("deferral"), kept], wall_offset_ns=0)
    made.append((facts.ADDED, 0, "r-0123abcd", 0.0, 130, None, False, None))
    keys = [([], 0)] * 2
    made.append((facts.LOOKUP, 0, "r-0123abcd", 1, 0, 130, None, [], keys, False, None, None))
    made.poll(2 * SECOND)
    assert len(kept.deferrals) == 1
    monkeypatch.setattr(emission, "judge", lambda case: 1 / 0)
    made.poll(8 * SECOND)
    monkeypatch.undo()
    monkeypatch.setattr(guard, "raise_errors", lambda: False)
    made.poll(20 * SECOND)
    made.append((facts.FINISHED, 30 * SECOND, "r-0123abcd", "abort", 130, 0, keys))
    made.flush()
    assert [round(one.deferral_seconds) for one in (*kept.deferrals, *kept.requests)] == [2, 20, 30]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (emission, "judge"), (emission, "servable_boundary"), (assembler.lookups, "read"),
        (assembler.accounting, "note_computed"), (assembler, "parent_ids"),
    ],
)  # fmt: skip
def test_an_error_in_our_own_code_ends_with_its_request(module, name, monkeypatch, caplog):
    numbers, kept = Numbers(), Kept()
    made = Recorder(engine(), numbers, [kept])
    real, calls = getattr(module, name), iter(range(100))

    def sometimes(*args, **kwargs):
        if next(calls) % 2 == 0:
            raise ValueError("ours")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, sometimes)
    made.start()
    serve(made, 8)
    made.close()
    assert numbers.counters[semconv.OBSERVER_ERRORS.name, ()] >= 4
    assert len(kept.requests) >= 4
    kinds = [line.getMessage().partition(";")[0] for line in caplog.records]
    assert len(kinds) == len(set(kinds))


def test_metrics_that_cannot_be_counted_stop_nothing(caplog):
    class Deaf(Numbers):
        def count(self, metric, value=1, labels=()):
            raise OSError("no")

    kept = Kept()
    made = Recorder(engine(), Deaf(), [kept])
    serve(made, 2)
    made.drain()
    made.flush()
    assert made.waiting == 0
    assert caplog.records


@contextlib.contextmanager
def endpoint(treat):
    """A TCP server on loopback; ``treat(connection)`` in a thread of its own for each."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=treat, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_an_endpoint_that_accepts_and_never_answers_holds_nobody_up():
    never, connected = threading.Event(), threading.Event()

    def hang(connection):
        connected.set()
        never.wait()
        connection.close()

    with endpoint(hang) as url:
        kept, numbers = Kept(), Numbers()
        spans = SpanSink.from_settings(engine(), url, {}, None, 64)
        made = Recorder(engine(), numbers, [spans, kept])
        made.start()
        assert connected.wait(20)
        serve(made, 200)
        eventually(lambda: len(kept.requests) == 200)
        serve(made, 1)
        made.close()
        assert kept.closed
        assert not never.is_set()
        assert numbers.counters[semconv.DROPPED_SPANS.name, ()] > 0
        never.set()


def test_without_a_receiver_nothing_is_made_started_or_said(caplog, monkeypatch):
    """No provider of ours, none of anybody else's touched, no thread, no line in the log."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    caplog.set_level(0)
    before, provider = set(threading.enumerate()), trace.get_tracer_provider()
    spans = SpanSink.from_settings(engine(), None, {}, None, 64)
    assert spans is None
    kept = Kept()
    made = Recorder(engine(), Numbers(), [kept])
    made.start()
    threads = {thread.name for thread in set(threading.enumerate()) - before}
    assert threads == {"kvlens-drain"}
    client = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    serve(made, 50, headers={"traceparent": client})
    made.close()
    assert len(kept.requests) == 50
    assert {record.span_id for record in kept.requests} == {""}
    assert trace.get_tracer_provider() is provider
    ours = {"MainThread", *threads}  # not what threads of other tests still say
    assert [line.getMessage() for line in caplog.records if line.threadName in ours] == []


def test_an_endpoint_that_resets_gets_everything_once_it_is_well(monkeypatch):
    monkeypatch.setattr(export_queue, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(export_queue, "MAX_PAUSE_SECONDS", 0.02)
    resets, taken = [], []

    def treat(connection):
        with connection:
            if len(resets) < 4:
                resets.append(connection.recv(10))
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                return
            with connection.makefile("rb") as stream:
                while stream.readline():
                    headers = dict(
                        line.decode().strip().lower().split(": ", 1)
                        for line in iter(stream.readline, b"\r\n")
                    )
                    body = ExportTraceServiceRequest()
                    body.ParseFromString(stream.read(int(headers["content-length"])))
                    for resource in body.resource_spans:
                        for scope in resource.scope_spans:
                            taken.extend(span.name for span in scope.spans)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with endpoint(treat) as url:
        spans = SpanSink.from_settings(engine(), url, {}, None, 4096)
        made = Recorder(engine(), Numbers(), [spans])
        made.start()
        serve(made, 3)
        eventually(lambda: taken.count(semconv.SPAN_REQUEST) == 3)
        made.close()
    assert len(resets) == 4
    assert spans.dropped == 0


def test_a_disk_that_takes_nothing_holds_nobody_up_and_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "QUEUE_BYTES", 4096)
    monkeypatch.setattr(flight_recorder, "RETRY_SECONDS", 0.01)
    folder = tmp_path / "recordings"
    folder.write_text("a file in its place")
    kept, numbers = Kept(), Numbers()
    made = Recorder(engine(), numbers, [recorder(folder), kept])
    made.start()
    serve(made, 50)
    eventually(lambda: len(kept.requests) == 50)
    assert numbers.counters[semconv.DROPPED_RECORDS.name, ()] > 0
    folder.unlink()
    eventually(lambda: folder.is_dir() and ids(folder))
    made.close()
    assert ids(folder)[-1] == "r49"


@pytest.mark.parametrize("jump", [3600.0, -3600.0, -4e9])
def test_a_wall_clock_that_jumps_moves_no_record(jump, tmp_path, monkeypatch):
    start, offset = time.time(), [0.0]
    wall, wall_ns = time.time, time.time_ns
    clock = SimpleNamespace(time=lambda: wall() + offset[0],
                            time_ns=lambda: wall_ns() + int(offset[0] * 1e9))  # fmt: skip
    monkeypatch.setattr(time, "time", clock.time)
    monkeypatch.setattr(time, "time_ns", clock.time_ns)
    kept = Kept()
    made = Recorder(engine(), Numbers(), [kept, recorder(tmp_path)])
    made.start()
    serve(made, 5, arrival=clock.time)
    offset[0] = jump
    serve(made, 5, arrival=clock.time)
    eventually(lambda: len(kept.requests) == 10)
    made.close()
    for record in kept.requests:
        assert start - 1 <= record.arrival_time <= record.finish_time <= start + 60
    finished = [record.finish_time for record in kept.requests]
    assert finished == sorted(finished)
    assert len(ids(tmp_path)) == 10


def test_the_operators_own_errors_are_counted_and_logged_once(caplog):
    numbers = Numbers()
    made = Recorder(engine(), numbers)
    for number in range(3):
        made.append((facts.ERROR, 0, "looked_up", f"KeyError: {number}"))
    made.append((facts.ERROR, 0, "admitted", "KeyError: 1"))
    made.drain()
    assert numbers.counters[semconv.OBSERVER_ERRORS.name, ()] == 4
    said = [line.getMessage().partition(":")[2].strip() for line in caplog.records]
    assert [text.partition(":")[0] for text in said] == [
        "KeyError in looked_up", "KeyError in admitted",
    ]  # fmt: skip
