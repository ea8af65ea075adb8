from __future__ import annotations

import logging
from pathlib import Path

import factory
import msgspec
import pytest

from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.model.actions import Action
from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store import retention
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import encode

NOW = factory.START
INFO = factory.engine(started_at=NOW - 5000)


def filled(path: Path, limits: RetentionLimits, count: int, padding: int = 0) -> SqliteStore:
    store = SqliteStore(str(path / "store.db"), limits)
    rows = []
    for n in range(count):
        record = factory.lost_record(n, INFO, finish=NOW - count + n)
        body = pack(encode(record)) if not padding else b"{" + bytes(padding) + b"}"
        rows.append(RecordRow(record, body))
    store.append([Batch([(INFO, NOW)], [], rows)])
    return store


def drain(store: SqliteStore) -> int:
    steps = 0
    while store.maintain(NOW).more:
        steps += 1
    return steps


def test_old_requests_go_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "STEP", 10)
    store = filled(tmp_path, RetentionLimits(25.0, 1e6, 1 << 40), 60)
    with caplog.at_level(logging.INFO, logger=retention.__name__):
        assert drain(store) == 4  # 35 requests are older than 25 s
    left = store.requests(RequestQuery()).records
    assert [record.request_id for record in left[-1:]] == ["cmpl-0035"]
    assert len(store.records_after(0, 1000)) == 25
    assert caplog.messages == ["retention: deleted 35 requests"]
    store.close()


def test_the_oldest_go_when_the_file_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "STEP", 10)
    store = filled(tmp_path, RetentionLimits(1e6, 1e6, 1 << 20), 300, padding=8192)
    assert drain(store) > 10
    store.close()
    assert (tmp_path / "store.db").stat().st_size < 1.2 * (1 << 20)


def test_sums_outlive_requests_but_not_for_ever(tmp_path: Path) -> None:
    store = filled(tmp_path, RetentionLimits(1.0, 1e6, 1 << 40), 5)
    entry = Action(id="1", incident_id="i", time=NOW, kind="acknowledge", who="ana")
    store.append([Batch(actions=[entry])])
    drain(store)
    assert store.actions() == [entry]
    assert sum(p.requests["lost"] for p in store.series(NOW - 3600, NOW, 3600, None)) == 5
    store.maintain(NOW + 3600)  # minutes go with the requests, hours stay
    assert store.series(NOW - 3600, NOW, 60, None) == []
    assert sum(p.requests["lost"] for p in store.series(NOW - 3600, NOW, 3600, None)) == 5
    store.close()
    later = SqliteStore(str(tmp_path / "store.db"), RetentionLimits(1.0, 3600.0, 1 << 40))
    later.maintain(NOW + 8000)
    assert later.actions() == []
    assert later.series(NOW - 3600, NOW, 3600, None) == []
    assert later.engines()[0].totals.requests == {"lost": 5}
    later.close()


def test_closed_incidents_go_and_open_ones_stay(tmp_path: Path) -> None:
    detector = ZeroHit()
    opened = [detector.observe(factory.lost_record(n, INFO, finish=NOW), INFO) for n in range(3)]
    incident = opened[-1]
    assert incident is not None
    closed = msgspec.structs.replace(incident, id="old", state="closed", closed_at=NOW)
    store = SqliteStore(str(tmp_path / "store.db"), RetentionLimits(60.0, 1e6, 1 << 40))
    store.save_detection(1, [incident, closed], [])
    store.maintain(NOW + 61)
    assert [item.id for item in store.incidents()] == [incident.id]
    store.close()


def test_engines_go_once_nothing_of_them_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    store = filled(tmp_path, RetentionLimits(1.0, 3600.0, 1 << 40), 3)
    later = factory.engine(incarnation_id="inc-a2", started_at=NOW + 10)
    store.append([Batch([(later, NOW + 10)])])  # it replaces the first
    store.maintain(NOW + 3500)
    assert len(store.engines()) == 2
    store.close()
    store = SqliteStore(path, RetentionLimits(1.0, 3600.0, 1 << 40))
    store.maintain(NOW + 3700)
    assert [engine.info.incarnation_id for engine in store.engines()] == ["inc-a2"]
    late = factory.lost_record(9, INFO, finish=NOW + 3700)
    store.append([Batch([(INFO, NOW + 3700)], [], [RecordRow(late, pack(encode(late)))])])
    kept = {engine.info.incarnation_id: engine.totals.requests for engine in store.engines()}
    assert kept == {"inc-a2": {}, "inc-a1": {"lost": 1}}
    store.close()


def test_a_long_deletion_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "STEP", 10)
    monkeypatch.setattr(retention, "_TELL_EVERY", 0.0)
    store = filled(tmp_path, RetentionLimits(25.0, 1e6, 1 << 40), 60)
    with caplog.at_level(logging.INFO, logger=retention.__name__):
        steps = [store.maintain(NOW) for _ in range(5)]
    assert [step.deleted for step in steps] == [10, 10, 10, 5, 0]
    assert all(step.size is not None and step.size > 0 for step in steps)
    assert [text.partition(",")[0] for text in caplog.messages] == [
        "retention: deleted 20 requests so far",
        "retention: deleted 30 requests so far",
        "retention: deleted 35 requests so far",
        "retention: deleted 35 requests",
    ]
    store.close()
