"""What only the SQLite file promises; the contract of all stores is in test_contract.py."""

from __future__ import annotations

from pathlib import Path

import factory
import pytest

from kvlens.dashboard.store.base import Batch, Row, StoreError
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import encode

A = factory.engine()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "store.db")
    record = factory.lost_record(1, A)
    batch = Batch([(A, factory.START)], [], [Row(record, pack(encode(record)))])
    first = SqliteStore(path)
    first.append([batch])
    with pytest.raises(StoreError, match="in use by another dashboard"):
        SqliteStore(path)
    first.close()
    second = SqliteStore(path)
    assert second.append([batch]).duplicates == 1
    second.close()
