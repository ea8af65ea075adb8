import sys
import time

import pytest
from recording import Kept, Numbers, engine

from kvlens.telemetry import facts, semconv
from kvlens.telemetry import recorder as telemetry_recorder
from kvlens.telemetry.recorder import Recorder


def recorder(queue_size=1024):
    numbers, kept = Numbers(), Kept()
    return Recorder(engine(), numbers, [kept], queue_size=queue_size), numbers, kept


def added(number):
    return (facts.ADDED, number, f"r{number}", 0.0, 100, None, False, None)


def finished(number):
    return (facts.FINISHED, number, f"r{number}", "stop", 100, 0, [([], 0), ([], 0)])


def test_the_thread_drains_and_close_emits_what_is_left():
    made, numbers, kept = recorder()
    made.start()
    for number in range(100):
        made.append(added(number))
        made.append(finished(number))
    made.close()
    made.close()
    assert len(kept.requests) == 100
    assert kept.closed
    assert sum(v for (name, _), v in numbers.counters.items() if name == "kvlens_requests") == 100
    assert not made._thread.is_alive()


def test_overflow_drops_the_oldest_and_counts_them():
    made, numbers, kept = recorder(queue_size=1024)
    for number in range(3000):
        made.append(added(number))
        assert len(made._queue) <= 1025
    made.append(finished(2999))
    made.flush()
    assert len(kept.requests) == 1
    dropped = numbers.counters[semconv.DROPPED_FACTS.name, ()]
    assert dropped > 3000 - 1024 - 1
    assert kept.requests[0].internal_request_id == "r2999"
    assert not made._assembler.residency.unknown


def test_losing_a_store_fact_makes_residency_unknown():
    made, _, _ = recorder(queue_size=1024)
    made.append((facts.STORED, 0, {b"key" + bytes(4)}, True))
    for number in range(2000):
        made.append(added(number))
    made.flush()
    assert made._assembler.residency.unknown
    assert made._assembler.residency.epoch == 1


def test_an_error_of_ours_is_raised_under_pytest():
    made, _, _ = recorder()
    made.append((facts.LOOKUP, "nonsense"))
    with pytest.raises(TypeError):
        made.drain()


def test_an_error_of_ours_is_contained_and_counted_in_production(monkeypatch, caplog):
    made, numbers, kept = recorder()
    monkeypatch.delitem(sys.modules, "pytest")
    for _ in range(5):
        made.append((facts.LOOKUP, "nonsense"))
    made.append(added(1))
    made.append(finished(1))
    made.flush()
    assert numbers.counters[semconv.OBSERVER_ERRORS.name, ()] == 5
    assert len(kept.requests) == 1
    assert sum("serving is not affected" in line.message for line in caplog.records) == 1


def test_facts_that_come_while_others_are_handled_wait_for_the_next_round():
    """Else requests would never be emitted under a load that keeps the queue from emptying."""

    class Busy(Numbers):
        def count(self, metric, value=1, labels=()):
            super().count(metric, value, labels)
            made.append((facts.ERROR, 0, "somewhere", "KeyError: 1"))

    made = Recorder(engine(), Busy(), [Kept()])
    made.append((facts.ERROR, 0, "somewhere", "KeyError: 0"))
    assert [made.drain() for _ in range(3)] == [1, 1, 1]
    assert made.waiting == 1


def test_what_cannot_be_handled_in_time_is_left_and_the_rest_is_emitted(monkeypatch):
    made, _, kept = recorder()
    for number in range(3):
        made.append(added(number))
        made.append(finished(number))
    clock = iter([0.0, 0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    made.flush(until=1.0)
    monkeypatch.undo()
    assert [record.internal_request_id for record in kept.requests] == ["r0", "r1"]
    assert made.waiting == 2


def test_closing_is_bounded_and_says_what_was_left(monkeypatch, caplog):
    made, _, kept = recorder()
    monkeypatch.setattr(telemetry_recorder, "LAST_DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(telemetry_recorder, "POLL_SECONDS", 3600)
    made.append(added(0))
    made.start()
    made.close()
    assert kept.closed
    assert [line.getMessage() for line in caplog.records] == [
        "kvlens: facts that waited when the engine stopped were left: 1"
    ]
