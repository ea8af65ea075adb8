"""What only the SQLite file promises; the contract of all stores is in test_contract.py."""

from __future__ import annotations

from pathlib import Path

import factory
import pytest

from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store import sqlite
from kvlens.dashboard.store.base import StoreError, TooSlowError
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import encode

A = factory.engine()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "store.db")
    record = factory.lost_record(1, A)
    batch = Batch([(A, factory.START)], [], [RecordRow(record, pack(encode(record)))])
    first = SqliteStore(path)
    first.append([batch])
    with pytest.raises(StoreError, match="in use by another dashboard"):
        SqliteStore(path)
    first.close()
    second = SqliteStore(path)
    assert second.append([batch]).duplicates == 1
    second.close()


def test_a_page_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(str(tmp_path / "store.db"))
    records = [factory.lost_record(n, A) for n in range(200)]
    store.append(
        [Batch([(A, factory.START)], [], [RecordRow(r, pack(encode(r))) for r in records])]
    )
    query = RequestQuery(sort="lost", max_served_tokens=-1)
    monkeypatch.setattr(sqlite, "_STEPS", 100)
    assert store.requests(query).records == []
    monkeypatch.setattr(sqlite, "_PATIENCE", -1.0)
    with pytest.raises(TooSlowError, match="narrow the time range, drop a filter, or sort by"):
        store.requests(query)
    monkeypatch.undo()
    assert len(store.requests(RequestQuery(sort="lost", limit=500)).records) == 200
    store.close()
