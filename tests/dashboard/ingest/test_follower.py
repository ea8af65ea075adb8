"""Several dashboards on one store: one detects. Here the store is SQLite, seen by each in turn."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import factory
import pytest
from waiting import eventually

from kvlens.dashboard.detect.engine import Detection
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.ingest import follower
from kvlens.dashboard.ingest.follower import Follower, FollowerAudience
from kvlens.dashboard.model.actions import Action
from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode

INFO = factory.engine()


class Shared:
    """What a dashboard sees of a store that it shares; ``hidden`` rows are not visible yet."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.leads = False
        self.fails = False
        self.hidden: set[int] = set()
        self.waiting: list[tuple[int, RequestRecord]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lead(self) -> bool:
        if self.fails:
            raise StoreError("the store does not answer")
        return self.leads

    def incarnations(self) -> list[tuple[EngineInfo, float | None]]:
        return [(engine.info, engine.ended_at) for engine in self._store.engines()]

    def seqs_after(self, seq: int) -> list[int]:
        found = self._store.records_after(seq, 10_000)
        return [number for number, _ in found if number not in self.hidden]

    def records_at(self, seqs: Sequence[int]) -> list[tuple[int, RequestRecord]]:
        return [item for item in self._store.records_after(0, 10_000) if item[0] in seqs]

    def deferrals_after(self, seq: int) -> list[tuple[int, RequestRecord]]:
        return [item for item in self.waiting if item[0] > seq]


class Dashboard:
    """A follower; keeps what it would show and notify."""

    def __init__(self, store: SqliteStore, settings: Settings) -> None:
        self.store = Shared(store)
        self.shown: list[Incident] = []
        self.told: list[Incident] = []
        self.adopted: list[Incident] | None = None
        self.metrics = SelfMetrics()

        def make() -> Detection:
            return Detection(
                all_detectors(settings.thresholds), self.store, self.incident, lambda: None
            )  # type: ignore[arg-type]

        self.follower = Follower(self.store, make, self, self, self.metrics)  # type: ignore[arg-type]

    def show(self, incident: Incident) -> None:
        self.shown.append(incident)

    def incident(self, incident: Incident) -> None:
        self.told.append(incident)

    def adopt(self, open_incidents: Sequence[Incident]) -> None:
        self.adopted = list(open_incidents)

    def release(self) -> None:
        self.adopted = None

    def tick(self) -> None:
        self.follower.tick()


@pytest.fixture
def one(store: SqliteStore, settings: Settings) -> Dashboard:
    made = Dashboard(store, settings)
    made.store.leads = True
    return made


@pytest.fixture
def two(store: SqliteStore, settings: Settings) -> Dashboard:
    return Dashboard(store, settings)


def lose(store: SqliteStore, *indexes: int) -> list[int]:
    records = [factory.lost_record(index, INFO) for index in indexes]
    rows = [RecordRow(record, pack(encode(record))) for record in records]
    appended = store.append([Batch([(INFO, factory.START + 10 + max(indexes))], [], rows)])
    return [seq for seq, _ in appended.records]


def incidents(store: SqliteStore) -> list[tuple[str, int]]:
    return [(incident.kind, incident.requests) for incident in store.incidents()]


def test_the_leader_detects_what_any_dashboard_stored(
    store: SqliteStore, one: Dashboard, two: Dashboard
) -> None:
    lose(store, 0, 1, 2)
    two.tick()
    assert store.incidents() == []
    one.tick()
    assert incidents(store) == [("zero_hit", 3)]
    assert {incident.id for incident in one.told} == {store.incidents()[0].id}
    two.tick()
    assert [incident.id for incident in two.shown] == [one.told[0].id]
    assert (two.told, one.shown) == ([], [])
    two.tick()
    assert len(two.shown) == 1  # nothing changed since


def test_each_record_is_seen_once(store: SqliteStore, one: Dashboard) -> None:
    lose(store, 0, 1, 2)
    for index in range(3, 9):
        one.tick()
        lose(store, index)
    one.tick()
    one.tick()
    assert incidents(store) == [("zero_hit", 9)]


def test_what_becomes_visible_late_is_still_seen(store: SqliteStore, one: Dashboard) -> None:
    first, second, third, _ = lose(store, 0, 1, 2, 3)
    one.store.hidden = {first, third}
    one.tick()
    assert incidents(store) == []
    one.store.hidden = {first}
    one.tick()
    assert incidents(store) == [("zero_hit", 3)]
    one.store.hidden = set()
    one.tick()
    one.tick()
    assert incidents(store) == [("zero_hit", 4)]
    assert second < third


def test_many_records_are_read_in_parts(
    store: SqliteStore, one: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_CHUNK", 4)
    lose(store, *range(10))
    one.tick()
    assert incidents(store) == [("zero_hit", 10)]


def test_another_dashboard_goes_on_where_the_leader_stopped(
    store: SqliteStore, one: Dashboard, two: Dashboard
) -> None:
    lose(store, 0, 1)
    one.tick()
    lose(store, 2)
    one.tick()
    (opened,) = store.incidents()
    one.store.leads, two.store.leads = False, True
    one.tick()
    assert not one.follower.leads
    assert one.adopted is None
    lose(store, 3)
    two.tick()
    assert two.adopted == [opened]
    assert incidents(store) == [("zero_hit", 4)]
    one.store.leads, two.store.leads = True, False
    two.tick()
    lose(store, 4)
    one.tick()
    assert incidents(store) == [("zero_hit", 5)]


def test_states_that_were_not_kept_yet_are_made_again(
    store: SqliteStore, one: Dashboard, two: Dashboard
) -> None:
    lose(store, 0)
    one.tick()
    lose(store, 1)
    one.tick()  # seen, and its state not flushed when the process is killed
    lose(store, 2)
    two.store.leads = True
    two.tick()
    assert incidents(store) == [("zero_hit", 3)]


def test_ends_of_engines_close_incidents(store: SqliteStore, one: Dashboard) -> None:
    lose(store, 0, 1, 2)
    one.tick()
    later = factory.engine(incarnation_id="inc-a2", started_at=factory.START + 100)
    store.append([Batch([(later, later.started_at)])])
    one.tick()
    assert store.incidents()[0].close_reason == "engine_gone"


def test_only_the_leader_listens_for_silence(
    store: SqliteStore, one: Dashboard, two: Dashboard
) -> None:
    lose(store, 0, 1, 2)
    for dashboard in (two, one):
        dashboard.follower.listen(time.time() + 60)
    two.tick()
    one.tick()
    assert store.incidents()[0].close_reason == "engine_gone"
    assert (two.told, one.told[-1].state) == ([], "closed")


def test_a_stall_is_seen_wherever_it_was_reported(store: SqliteStore, one: Dashboard) -> None:
    store.append([Batch([(INFO, factory.START)])])
    one.tick()
    waiting = factory.lost_record(1, INFO)
    waiting.deferral_seconds, waiting.verdict, waiting.cause = 60.0, "stalled", "pending_store"
    one.store.waiting = [(2**62, waiting)]
    one.tick()
    one.tick()
    assert [incident.kind for incident in store.incidents()] == ["deferral_stall"]


def test_acting_at_one_dashboard_is_shown_at_the_other_and_notified_by_the_leader(
    store: SqliteStore, one: Dashboard, two: Dashboard
) -> None:
    lose(store, 0, 1, 2)
    one.tick()
    two.tick()
    (incident,) = store.incidents()
    told, shown = len(one.told), len(two.shown)
    entry = Action(id="1", incident_id=incident.id, time=factory.START, kind="acknowledge", who="a")
    store.append([Batch(actions=[entry])])
    one.tick()
    two.tick()
    assert (len(one.told), len(two.shown)) == (told + 1, shown + 1)


def test_a_dashboard_without_the_store_does_not_lead(store: SqliteStore, one: Dashboard) -> None:
    lose(store, 0, 1, 2)
    one.tick()
    one.store.fails = True
    with pytest.raises(StoreError):
        one.tick()
    assert not one.follower.leads
    assert one.adopted is None
    one.store.fails = False
    lose(store, 3)
    one.tick()
    assert incidents(store) == [("zero_hit", 4)]


def test_the_thread_outlives_errors_and_keeps_states_at_its_end(
    store: SqliteStore, one: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_TICK", 0.01)
    failing = iter([True, True])
    lead = one.store.lead

    def sometimes() -> bool:
        if next(failing, False):
            raise sqlite3.OperationalError("disk I/O error")
        return lead()

    monkeypatch.setattr(one.store, "lead", sometimes)
    last = lose(store, 0, 1)[-1]
    one.follower.start()
    eventually(lambda: store.load_detection().checkpoint == last)
    one.follower.stop()
    one.follower.flush()
    assert one.follower.leads
    value = one.metrics.registry.get_sample_value("kvlens_dashboard_errors_total")
    assert value == 2


def test_the_writer_shows_actions_and_leaves_notifying_to_the_leader() -> None:
    class Audience:
        def requests(self, records: Sequence[RequestRecord]) -> None:
            raise AssertionError("not called here")

        engine = requests

        def incident(self, incident: Incident) -> None:
            raise AssertionError("the leader does that")

    shown: list[Incident] = []
    quiet = FollowerAudience(Audience(), shown.append)  # type: ignore[arg-type]
    quiet.incident("an incident")  # type: ignore[arg-type]
    assert shown == ["an incident"]
