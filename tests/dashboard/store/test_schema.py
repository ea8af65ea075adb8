from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import factory
import pytest

from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store import schema
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.query import page_sql
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import encode


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def version(path: str) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_new_file_is_private_and_current(path: str) -> None:
    SqliteStore(path).close()
    assert version(path) == len(schema.MIGRATIONS)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_each_migration_is_applied_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    added = (*schema.MIGRATIONS, "CREATE TABLE later (x); INSERT INTO later VALUES (1);")
    monkeypatch.setattr(schema, "MIGRATIONS", added)
    for _ in range(2):
        SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT x FROM later").fetchall() == [(1,)]
    assert version(path) == len(added)


def test_a_failed_migration_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    broken = (*schema.MIGRATIONS, "CREATE TABLE later (x); INSERT INTO nowhere VALUES (1);")
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    with pytest.raises(StoreError, match="no such table: nowhere"):
        SqliteStore(path)
    monkeypatch.undo()
    assert version(path) == len(schema.MIGRATIONS)
    SqliteStore(path).close()


def test_sums_of_the_first_version_are_taken_over(path: str) -> None:
    db = sqlite3.connect(path)
    first = factory.engine()
    db.executescript(
        f"{schema.MIGRATIONS[0]}; PRAGMA user_version = 1;"
        f"PRAGMA application_id = {schema.APPLICATION_ID};"
    )
    start = int(factory.START) // 3600 * 60  # minutes, on a full hour
    rows = [
        (0, start, "requests.lost", 2.0),
        (0, start, "lost_tokens", 1024.0),
        (0, start + 59, "requests.lost", 1.0),
        (0, start + 60, "requests.full", 4.5),
    ]
    db.executemany("INSERT INTO rollups VALUES (?, ?, ?, ?)", rows)
    db.execute(
        "INSERT INTO engines VALUES (1, 'inc-a1', 'node-a:0', 0, 'node-a', 'm', ?, 0, 0, NULL,"
        " NULL, ?)",
        (first.started_at, encode(first)),
    )
    db.execute("INSERT INTO totals VALUES (1, 'requests.lost', 3.0), (1, 'requests.full', 4.5)")
    db.commit()
    db.close()
    store = SqliteStore(path)
    minutes = store.series(start * 60, start * 60 + 7200, 60, None)
    assert [(p.time // 60 - start, p.requests) for p in minutes] == [
        (0, {"lost": 2}),
        (59, {"lost": 1}),
        (60, {"full": 4.5}),
    ]
    hours = store.series(start * 60, start * 60 + 7200, 3600, None)
    assert [(p.requests, p.lost_tokens) for p in hours] == [({"lost": 3}, 1024), ({"full": 4.5}, 0)]
    assert store.engines()[0].totals.requests == {"lost": 3, "full": 4.5}
    record = factory.lost_record(1, first, finish=start * 60.0)
    store.append([Batch([(first, factory.START)], [], [RecordRow(record, pack(encode(record)))])])
    assert store.series(start * 60, start * 60 + 59, 60, None)[0].requests == {"lost": 3}
    assert store.engines()[0].totals.requests == {"lost": 4, "full": 4.5}
    store.close()


def test_a_newer_file_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    monkeypatch.setattr(schema, "MIGRATIONS", ())
    with pytest.raises(StoreError, match="written by a newer kvlens"):
        SqliteStore(path)


def test_foreign_files_are_refused(path: str, tmp_path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="belongs to another program"):
        SqliteStore(path)
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look at" * 20)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore(str(text))


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/x\.db: .* name another with --store"):
        SqliteStore(str(tmp_path / "file" / "x.db"))


@pytest.mark.parametrize(
    ("query", "engines", "index"),
    [
        (RequestQuery(), None, "requests_by_time"),
        (RequestQuery(min_lost_tokens=1), None, "anomalous_by_time"),
        (RequestQuery(verdicts=("lost", "partial")), None, "anomalous_by_time"),
        (RequestQuery(verdicts=("cold",)), None, "requests_by_verdict"),
        (RequestQuery(cause="capacity"), None, "requests_by_cause"),
        (RequestQuery(min_expected_tokens=1), None, "requests_by_time"),
        (RequestQuery(min_expected_tokens=1, max_served_tokens=0), [1], "anomalous_by_engine"),
        (RequestQuery(), [1], "requests_by_engine"),
        (RequestQuery(verdicts=("lost",)), [1, 2], "anomalous_by_engine"),
        (RequestQuery(sort="oldest"), None, "requests_by_time"),
        (RequestQuery(sort="oldest", min_lost_tokens=1), [1, 2], "anomalous_by_engine"),
        (RequestQuery(sort="lost"), None, "requests_by_lost_tokens"),
        (RequestQuery(sort="served", since=9.0), [1, 2], "requests_by_served_tokens"),
        (RequestQuery(sort="expected", cause="capacity"), None, "requests_by_expected_tokens"),
        (
            RequestQuery(sort="lost", cursor="lost_7_0x1.0000000000000p+0_1"),
            None,
            "requests_by_lost_tokens",
        ),
    ],
)
def test_a_page_is_read_in_order_from_an_index(
    path: str, query: RequestQuery, engines: list[int] | None, index: str
) -> None:
    db = schema.open_writer(path)
    sql, params = page_sql(query, engines)
    plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", params)]
    db.close()
    assert any(f"INDEX {index}" in step for step in plan), plan
    # Sorting may only happen outside, over at most one page per engine; or of neighbours
    # with the same number of tokens and the same time ("FOR LAST TERM OF ORDER BY").
    inner = plan[: next(n for n, step in enumerate(plan) if "bodies" in step)]
    assert not any("TEMP B-TREE FOR ORDER BY" in step for step in inner), plan
