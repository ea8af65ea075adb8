"""Detection over a real store: order, restarts and contained errors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import factory
import pytest

from kvlens.dashboard.detect.engine import Detection
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.model.batch import Appended, Batch, RecordRow
from kvlens.dashboard.model.engine import EngineEvent
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode
from kvlens.telemetry.semconv import ENGINE_STOPPED, IncidentKind

INFO = factory.engine()


class Run:
    """A store, its detection and what was published."""

    def __init__(self, store: SqliteStore, *detectors: ZeroHit) -> None:
        self.store = store
        self.published: list[Incident] = []
        self.errors = 0
        self.detection = Detection(
            detectors or [ZeroHit()], store, self.published.append, self._failed
        )
        self.detection.restore()

    def _failed(self) -> None:
        self.errors += 1

    def commit(self, records: Sequence[RequestRecord], stopped: float | None = None) -> Appended:
        """Store only, as if the process died before detection."""
        events = [] if stopped is None else [EngineEvent("inc-a1", ENGINE_STOPPED, stopped)]
        rows = [RecordRow(record, pack(encode(record))) for record in records]
        return self.store.append([Batch([(INFO, factory.START)], events, rows)])

    def send(self, records: Sequence[RequestRecord], stopped: float | None = None) -> None:
        appended = self.commit(records, stopped)
        self.detection.process(appended.records, appended.ended, [INFO])


def lost(*indexes: int) -> list[RequestRecord]:
    return [factory.lost_record(index, INFO) for index in indexes]


def test_incidents_are_kept_and_published_once_per_commit(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0, 1))
    assert run.published == []
    run.send(lost(2, 3, 4))
    assert [incident.requests for incident in run.published] == [5]
    assert store.incidents() == run.published
    assert store.load_detection().checkpoint == 5


def test_a_commit_is_seen_in_the_order_of_finish_times(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(2, 0, 1))
    assert run.published[0].opened_at == factory.START + 12
    assert run.published[0].example_requests[0].startswith("cmpl-0000")


def test_duplicates_are_not_seen_twice(store: SqliteStore) -> None:
    run = Run(store)
    for _ in range(3):
        run.send(lost(0, 1))
    assert run.published == []


def test_a_restart_goes_on_where_it_stopped(store: SqliteStore) -> None:
    Run(store).send(lost(0, 1))  # nothing saved yet: below the incident
    second = Run(store)
    second.send(lost(2))
    assert [incident.requests for incident in second.published] == [3]
    third = Run(store)
    third.send(lost(3))
    assert [incident.requests for incident in third.published] == [4]
    assert len(store.incidents()) == 1


def test_what_was_committed_but_not_examined_is_found_at_the_start(store: SqliteStore) -> None:
    Run(store).commit(lost(0, 1, 2), stopped=factory.START + 60)
    second = Run(store)
    assert [(i.state, i.close_reason) for i in second.published] == [
        ("open", None),
        ("closed", "engine_gone"),
    ]
    assert [incident.state for incident in store.incidents()] == ["closed"]
    assert Run(store).published == []


def test_stop_closes_after_the_records_sent_with_it(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0, 1, 2), stopped=factory.START + 60)
    assert [(i.state, i.closed_at) for i in run.published] == [("closed", factory.START + 60)]
    run.send(lost(3, 4, 5))  # late, after the stop: closed at once
    assert [incident.state for incident in store.incidents()] == ["closed", "closed"]
    assert store.load_detection().states == []


def test_incidents_of_an_engine_that_fell_silent_are_closed(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0, 1, 2))
    assert run.detection.listen(time.time() - 60) == []
    assert run.detection.listen(time.time() + 60) == ["inc-a1"]
    (incident,) = store.incidents()
    assert (incident.state, incident.close_reason) == ("closed", "engine_gone")
    assert incident.closed_at is not None
    assert time.time() - 60 < incident.closed_at <= time.time()
    run.send(lost(3, 4))  # it was only cut off
    assert len(store.incidents("open")) == 0
    run.send(lost(5))
    (again,) = store.incidents("open")
    assert (again.requests, again.id == incident.id) == (3, False)


def test_a_process_that_died_between_silence_and_its_incident(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0, 1, 2))
    assert [ident for ident, _ in store.silence(time.time() + 60)] == ["inc-a1"]
    assert [incident.state for incident in store.incidents()] == ["open"]
    second = Run(store)
    assert [incident.state for incident in store.incidents()] == ["closed"]
    second.send(lost(3, 4, 5))
    assert [incident.requests for incident in store.incidents("open")] == [3]


def test_a_silent_engine_does_not_speak_for_its_model(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0))
    assert run.detection._tells(INFO.model)
    run.detection.listen(time.time() + 60)
    assert not run.detection._tells(INFO.model)
    run.send(lost(1))
    assert run.detection._tells(INFO.model)


def test_flush_keeps_states_without_an_incident(store: SqliteStore) -> None:
    run = Run(store)
    run.send(lost(0, 1))
    assert store.load_detection().checkpoint == 0
    run.detection.flush()
    assert store.load_detection().checkpoint == 2
    assert [state[:2] for state in store.load_detection().states] == [("zero_hit", "inc-a1")]


class Broken(ZeroHit):
    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        raise RuntimeError("bug")


def test_a_broken_detector_does_not_stop_the_others(store: SqliteStore) -> None:
    run = Run(store, Broken(), ZeroHit())
    run.send(lost(0, 1, 2))
    assert run.errors == 3
    assert len(run.published) == 1


def test_what_could_not_be_kept_is_kept_with_the_next_commit(store: SqliteStore) -> None:
    run = Run(store)
    save = store.save_detection

    def fail(*args: object) -> None:
        raise OSError("disk full")

    store.save_detection = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk full"):
        run.send(lost(0, 1, 2))
    assert run.published == []
    store.save_detection = save  # type: ignore[method-assign]
    run.send([])
    assert [incident.requests for incident in run.published] == [3]


def test_states_of_unknown_detectors_are_left_alone(store: SqliteStore) -> None:
    store.save_detection(0, [], [("of_a_later_version", "inc-a1", b"?")])
    run = Run(store)
    assert run.errors == 0


def test_detectors_take_the_settings(settings: Settings) -> None:
    detectors = all_detectors(settings.thresholds)
    scraped_only = {
        IncidentKind.LOOKUP_FALLBACK, IncidentKind.NOTHING_STORED, IncidentKind.LOW_HITS,
        IncidentKind.LOCAL_HITS_LOST,
    }  # fmt: skip
    assert {detector.kind for detector in detectors} == set(IncidentKind) - scraped_only
