from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import factory
import pytest

from kvlens.dashboard.detect.engine import Detection
from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.ingest.writer import Busy, Writer
from kvlens.dashboard.model.batch import Appended, Batch, RecordRow
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import RequestRecord, encode

INFO = factory.engine()


class Audience:
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.engines: list[Engine] = []

    def requests(self, records: Sequence[RequestRecord]) -> None:
        self.seen += [record.request_id for record in records]

    def engine(self, engine: Engine) -> None:
        self.engines.append(engine)


class Bench:
    """A writer whose commits can be held up."""

    def __init__(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.metrics = SelfMetrics()
        self.audience = Audience()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.groups: list[int] = []
        append = store.append

        def gated(batches: Sequence[Batch]) -> Appended:
            self.entered.set()
            self.gate.wait(10)
            self.groups.append(len(batches))
            return append(batches)

        monkeypatch.setattr(store, "append", gated)
        detection = Detection([ZeroHit()], store, lambda _: None, self.metrics.errors.inc)
        self.writer = Writer(store, detection, self.audience, self.metrics, capacity=2)

    def value(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)


@pytest.fixture
def bench(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(store, monkeypatch)
    made.writer.start()
    yield made
    made.gate.set()
    if made.writer.alive:
        made.writer.stop()


def batch(*indexes: int) -> Batch:
    records = [factory.lost_record(index, INFO) for index in indexes]
    rows = [RecordRow(record, pack(encode(record))) for record in records]
    return Batch([(INFO, factory.START)], [], rows)


def stranger() -> Batch:
    """A batch that the store refuses: a record of an engine that did not introduce itself."""
    other = factory.engine("n:9", "inc-9")
    return Batch([], [], [RecordRow(factory.lost_record(1, other), b"{}")])


def test_done_means_durable(bench: Bench) -> None:
    bench.writer.submit(batch(1)).result(10)
    assert bench.store.request("cmpl-0001") is not None
    bench.writer.stop()
    assert bench.audience.seen == ["cmpl-0001"]
    assert [engine.totals.requests for engine in bench.audience.engines] == [{"lost": 1}]
    assert bench.value("kvlens_dashboard_records_total") == 1


def test_waiting_batches_share_a_commit(bench: Bench) -> None:
    bench.gate.clear()
    first = bench.writer.submit(batch(1))
    assert bench.entered.wait(10)
    rest = [bench.writer.submit(batch(n)) for n in range(1, 5)]
    assert not first.done()
    bench.gate.set()
    for future in [first, *rest]:
        future.result(10)
    assert bench.groups == [1, 4]
    bench.writer.stop()
    assert bench.value("kvlens_dashboard_duplicate_records_total") == 1


def test_slots_are_bounded(bench: Bench) -> None:
    with bench.writer.slot(), bench.writer.slot():
        assert bench.writer.full
        assert bench.value("kvlens_dashboard_queued_batches") == 2
        with pytest.raises(Busy), bench.writer.slot():
            pass
    assert not bench.writer.full


def test_one_bad_batch_does_not_fail_the_others(bench: Bench) -> None:
    bench.gate.clear()
    blocker = bench.writer.submit(batch(1))
    assert bench.entered.wait(10)
    good, bad, after = (bench.writer.submit(b) for b in (batch(2), stranger(), batch(3)))
    bench.gate.set()
    for future in (blocker, good, after):
        future.result(10)
    with pytest.raises(StoreError, match="the batch was not stored"):
        bad.result(10)
    assert bench.writer.alive
    assert bench.value("kvlens_dashboard_errors_total") == 1


def test_a_sender_that_hung_up_is_passed_over(bench: Bench) -> None:
    bench.gate.clear()
    first = bench.writer.submit(batch(1))
    assert bench.entered.wait(10)
    second = bench.writer.submit(batch(2))
    assert second.cancel()
    third = bench.writer.submit(batch(3))
    bench.gate.set()
    first.result(10)
    third.result(10)
    assert bench.store.request("cmpl-0002") is None


def test_stop_writes_what_is_queued(bench: Bench) -> None:
    futures = [bench.writer.submit(batch(n)) for n in range(20)]
    bench.writer.stop()
    assert all(future.done() for future in futures)
    assert len(bench.store.records_after(0, 100)) == 20
    assert bench.store.load_detection().checkpoint == 20
    assert not bench.writer.alive


def test_detection_errors_do_not_stop_ingest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(bench.store, "save_detection", fail)
    bench.writer.submit(batch(1, 2, 3)).result(10)
    bench.writer.submit(batch(4)).result(10)
    monkeypatch.undo()
    bench.writer.stop()
    assert (bench.value("kvlens_dashboard_errors_total") or 0) >= 1
    assert [incident.requests for incident in bench.store.incidents()] == [4]
