"""The write side of the SQLite store: one connection, one thread."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Final

import msgspec

from kvlens.dashboard.model.actions import Action
from kvlens.dashboard.model.batch import Appended, Batch, RecordRow
from kvlens.dashboard.model.engine import REPLACED, SILENT, STOPPED, EngineEvent
from kvlens.dashboard.store.rollup import (
    EVER,
    LEVELS,
    MINUTE,
    Counters,
    add,
    counters,
    of_fleet,
    pack,
    unpack,
)
from kvlens.dashboard.store.schema import FLEET
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode
from kvlens.telemetry.semconv import ENGINE_STOPPED, QUIET_VERDICTS

_QUIET: Final = frozenset(map(str, QUIET_VERDICTS))
_ENGINE: Final = """
INSERT INTO engines (incarnation_id, engine_id, dp_rank, host, model, started_at, first_seen,
                     last_seen, info)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_ALIVE: Final = f"(ended_at IS NULL OR end_reason = '{SILENT}')"
_REPLACE: Final = f"""
UPDATE engines SET ended_at = ?, end_reason = ?
WHERE engine_id = ? AND dp_rank = ? AND host = ? AND started_at < ? AND {_ALIVE}
RETURNING incarnation_id"""
_STOP: Final = f"""
UPDATE engines SET ended_at = ?, end_reason = ? WHERE incarnation_id = ? AND {_ALIVE}"""
_HEARD: Final = f"""
UPDATE engines SET last_seen = max(last_seen, ?), heard_at = ?,
    ended_at = iif(end_reason = '{SILENT}', NULL, ended_at),
    end_reason = nullif(end_reason, '{SILENT}')
WHERE incarnation_id = ?"""
_SILENCE: Final = f"""
UPDATE engines SET ended_at = max(last_seen, heard_at), end_reason = '{SILENT}'
WHERE ended_at IS NULL AND heard_at < ? RETURNING incarnation_id, ended_at"""
_REQUEST: Final = """
INSERT OR IGNORE INTO requests (engine_no, internal_request_id, request_id, finish_time, verdict,
    cause, anomalous, lost_tokens, expected_tokens, served_tokens)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_SLOT: Final = "SELECT counters FROM sums WHERE level = ? AND engine_no = ? AND slot = ?"

_ACTION: Final = "INSERT OR IGNORE INTO actions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

Sums = dict[tuple[int, int], Counters]
"""By engine number and minute."""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        # A failed COMMIT (disk full) may have ended the transaction already.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


class SqliteAppender:
    """Appends batches; knows the engines, so that a row costs no query."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._numbers: dict[str, int] = {}
        self._infos: dict[str, EngineInfo] = {}
        self.reload()

    def reload(self) -> None:
        """Learn the engines anew, after a failed or a foreign change of their table."""
        self._infos.clear()
        self._numbers = dict(self._db.execute("SELECT incarnation_id, engine_no FROM engines"))

    def append(self, batches: Sequence[Batch]) -> Appended:
        """Make all batches durable in one transaction, then return."""
        try:
            with transaction(self._db):
                return self._append(batches)
        except BaseException:
            self.reload()
            raise

    def _append(self, batches: Sequence[Batch]) -> Appended:
        records: list[tuple[int, RequestRecord]] = []
        ended: list[tuple[str, float]] = []
        newest: dict[str, float] = {}
        sums: Sums = {}
        acted_on: list[str] = []
        rows = 0
        for batch in batches:
            for info, at in batch.engines:
                ended += self._register(info, at)
                newest[info.incarnation_id] = max(at, newest.get(info.incarnation_id, at))
            for row in batch.rows:
                rows += 1
                seq = self._insert(row)
                if seq is not None:
                    records.append((seq, row.record))
                    self._sum(sums, row.record)
            for event in batch.events:
                ended += self._event(event)
            acted_on += map(self._act, batch.actions)
        now = time.time()
        self._db.executemany(_HEARD, [(at, now, ident) for ident, at in newest.items()])
        self._flush(sums)
        return Appended(records, rows - len(records), frozenset(newest), ended, acted_on)

    def silence(self, heard_before: float) -> list[tuple[str, float]]:
        """See :meth:`kvlens.dashboard.store.base.Store.silence`."""
        with transaction(self._db) as db:
            return db.execute(_SILENCE, (heard_before,)).fetchall()

    def _register(self, info: EngineInfo, at: float) -> list[tuple[str, float]]:
        known = self._infos.get(info.incarnation_id)
        if known == info:
            return []
        self._infos[info.incarnation_id] = info
        if info.incarnation_id in self._numbers:
            self._db.execute(
                "UPDATE engines SET info = ? WHERE incarnation_id = ?",
                (encode(info), info.incarnation_id),
            )
            return []
        cursor = self._db.execute(
            _ENGINE,
            (
                info.incarnation_id,
                info.engine_id,
                info.dp_rank,
                info.host,
                info.model,
                info.started_at,
                at,
                at,
                encode(info),
            ),
        )
        assert cursor.lastrowid is not None
        self._numbers[info.incarnation_id] = cursor.lastrowid
        # An engine that was killed never says that it stopped; its successor does.
        replaced = self._db.execute(
            _REPLACE,
            (info.started_at, REPLACED, info.engine_id, info.dp_rank, info.host, info.started_at),
        ).fetchall()
        return [(incarnation, info.started_at) for (incarnation,) in replaced]

    def _insert(self, row: RecordRow) -> int | None:
        """``seq`` of a new request, None for one that is there already."""
        record = row.record
        anomalous = (
            record.verdict not in _QUIET
            or record.cause is not None
            or record.lost_tokens > 0
            or record.expected_tokens > 0 == record.served_tokens
        )
        cursor = self._db.execute(
            _REQUEST,
            (
                self._numbers[record.incarnation_id],
                record.internal_request_id,
                record.request_id,
                record.finish_time,
                record.verdict,
                record.cause,
                int(anomalous),
                record.lost_tokens,
                record.expected_tokens,
                record.served_tokens,
            ),
        )
        if not cursor.rowcount:
            return None
        seq = cursor.lastrowid
        assert seq is not None
        self._db.execute("INSERT INTO bodies VALUES (?, ?)", (seq, row.body))
        return seq

    def _event(self, event: EngineEvent) -> list[tuple[str, float]]:
        if event.state != ENGINE_STOPPED:
            return []
        cursor = self._db.execute(
            _STOP,
            (event.time, STOPPED, event.incarnation_id),
        )
        return [(event.incarnation_id, event.time)] if cursor.rowcount else []

    def _act(self, action: Action) -> str:
        """Log an action; its incident has changed for whoever follows incidents."""
        self._db.execute(_ACTION, msgspec.structs.astuple(action))
        self._db.execute(
            "UPDATE incidents SET changed_at = max(changed_at, ?) WHERE id = ?",
            (action.time, action.incident_id),
        )
        return action.incident_id

    def _sum(self, sums: Sums, record: RequestRecord) -> None:
        slot = self._numbers[record.incarnation_id], int(record.finish_time // MINUTE)
        add(sums.setdefault(slot, {}), counters(record))

    def _flush(self, sums: Sums) -> None:
        """Add the sums per engine and minute to all that is kept of them."""
        slots: dict[tuple[int, int, int], Counters] = {}
        for (number, minute), found in sums.items():
            add(slots.setdefault((EVER, number, 0), {}), found.items())
            both = ((number, found), (FLEET, of_fleet(found)))
            for level, (engine, more) in product(LEVELS, both):
                add(slots.setdefault((level, engine, minute * MINUTE // level), {}), more.items())
        for slot, found in slots.items():
            kept = self._db.execute(_SLOT, slot).fetchone()
            if kept is not None:
                found = add(unpack(kept[0]), found.items())
            self._db.execute(
                "INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?)", (*slot, pack(found))
            )
