"""The embedded store: one SQLite file in WAL mode.

One connection writes, on one thread; readers borrow connections of their own
and see the last commit, without waiting for the writer.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from kvlens.dashboard.model.actions import Action, Handling, by_incident
from kvlens.dashboard.model.batch import Appended, Batch
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.query import FoundRequests, RequestQuery
from kvlens.dashboard.model.totals import Point, Totals
from kvlens.dashboard.store import schema
from kvlens.dashboard.store.append import SqliteAppender, transaction
from kvlens.dashboard.store.base import DetectionState, TooSlowError, Upkeep
from kvlens.dashboard.store.codec import unpack
from kvlens.dashboard.store.order import ORDERS
from kvlens.dashboard.store.query import page_sql
from kvlens.dashboard.store.retention import Retention, RetentionLimits
from kvlens.dashboard.store.rollup import fill, level_of, points
from kvlens.dashboard.store.rollup import unpack as unpack_sums
from kvlens.telemetry.records import RequestRecord, decode_engine, decode_record

_READERS: Final = 8
_PATIENCE: Final = 5.0
"""Seconds after which a page is given up."""
_STEPS: Final = 100_000
"""Instructions of SQLite's machine between two looks at the clock."""
_DEFAULT_LIMITS: Final = RetentionLimits(30 * 86_400.0, 365 * 86_400.0, 20 << 30)
_ENGINES: Final = """
SELECT info, first_seen, last_seen, ended_at, end_reason, counters,
    (SELECT count(*) FROM incidents i WHERE i.incarnation_id = e.incarnation_id
        AND i.state = 'open') AS open_incidents
FROM engines e LEFT JOIN sums s ON s.level = 0 AND s.engine_no = e.engine_no AND s.slot = 0"""
_INCIDENTS: Final = """
SELECT body FROM incidents
WHERE (?1 IS NULL OR state = ?1)
    AND (?2 IS NULL OR incarnation_id = ?2 OR json_extract(body, '$.engine_id') = ?2)
    AND (?3 IS NULL OR ?3 BETWEEN json_extract(body, '$.scope.since')
        AND json_extract(body, '$.scope.until'))
    AND (?4 IS NULL OR changed_at >= ?4)
ORDER BY opened_at DESC, id LIMIT ?5"""
_incident_decoder = msgspec.json.Decoder(Incident)


class SqliteStore:
    """See :class:`kvlens.dashboard.store.base.Store`."""

    shared = False

    def __init__(self, path: str, limits: RetentionLimits = _DEFAULT_LIMITS) -> None:
        """Open or create ``path``; raises :class:`StoreError`."""
        self._path = path
        self._lock = schema.lock(path)
        try:
            self._db = schema.open_writer(path)
        except BaseException:
            os.close(self._lock)
            raise
        self._appender = SqliteAppender(self._db)
        self._retention = Retention(self._db, limits)
        # LIFO: a quiet dashboard keeps using the connection whose cache is warm.
        self._readers: queue.LifoQueue[sqlite3.Connection | None] = queue.LifoQueue()
        for _ in range(_READERS):
            self._readers.put(None)

    def close(self) -> None:
        """Release files and connections; no call may follow."""
        for _ in range(_READERS):
            if (reader := self._readers.get()) is not None:
                reader.close()
        self._db.close()
        os.close(self._lock)

    # --- the writer thread ----------------------------------------------------

    def append(self, batches: Sequence[Batch]) -> Appended:
        """Make all batches durable in one transaction, then return."""
        return self._appender.append(batches)

    def silence(self, heard_before: float) -> list[tuple[str, float]]:
        """End engines of which nothing was heard since then; see :class:`Store`."""
        return self._appender.silence(heard_before)

    def save_detection(
        self,
        checkpoint: int,
        incidents: Sequence[Incident],
        states: Sequence[tuple[str, str, bytes | None]],
    ) -> None:
        """Keep incidents and detector states together; a state of None is deleted."""
        now = time.time()
        with transaction(self._db) as db:
            db.execute("UPDATE checkpoint SET seq = ?", (checkpoint,))
            db.executemany(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        i.id,
                        i.incarnation_id,
                        i.state,
                        i.opened_at,
                        i.closed_at,
                        now,
                        msgspec.json.encode(i).decode(),
                    )
                    for i in incidents
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO detection VALUES (?, ?, ?)",
                [state for state in states if state[2] is not None],
            )
            db.executemany(
                "DELETE FROM detection WHERE detector = ? AND incarnation_id = ?",
                [state[:2] for state in states if state[2] is None],
            )

    def load_detection(self) -> DetectionState:
        """Return what :meth:`save_detection` kept last."""
        with self._reader() as db:
            checkpoint = db.execute("SELECT seq FROM checkpoint").fetchone()[0]
            states = db.execute("SELECT detector, incarnation_id, state FROM detection").fetchall()
        return DetectionState(checkpoint, states)

    def maintain(self, now: float) -> Upkeep:
        """Do one small step of retention."""
        upkeep = self._retention.step(now)
        if self._retention.engines_went:
            self._retention.engines_went = False
            self._appender.reload()
        return upkeep

    # --- any thread -----------------------------------------------------------

    def records_after(self, seq: int, limit: int) -> list[tuple[int, RequestRecord]]:
        """Records with a higher ``seq``, in its order."""
        with self._reader() as db:
            rows = db.execute(
                "SELECT seq, body FROM bodies WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
            ).fetchall()
        return [(seq, decode_record(unpack(body))) for seq, body in rows]

    def engines(self) -> list[Engine]:
        """All incarnations, newest start first."""
        with self._reader() as db:
            rows = db.execute(f"{_ENGINES} ORDER BY started_at DESC, e.engine_no DESC").fetchall()
        return [_engine(row) for row in rows]

    def engine(self, ident: str) -> Engine | None:
        """By incarnation id, or the newest incarnation of an engine id."""
        with self._reader() as db:
            row = db.execute(
                f"{_ENGINES} WHERE incarnation_id = ?1 OR engine_id = ?1"
                " ORDER BY incarnation_id = ?1 DESC, started_at DESC LIMIT 1",
                (ident,),
            ).fetchone()
        return None if row is None else _engine(row)

    def incidents(
        self,
        state: str | None = None,
        *,
        engine: str | None = None,
        at: float | None = None,
        changed_since: float | None = None,
        limit: int | None = None,
    ) -> list[Incident]:
        """See :meth:`kvlens.dashboard.store.base.Store.incidents`."""
        with self._reader() as db:
            rows = db.execute(
                _INCIDENTS, (state, engine, at, changed_since, -1 if limit is None else limit)
            ).fetchall()
        return [_incident_decoder.decode(body) for (body,) in rows]

    def incident(self, ident: str) -> Incident | None:
        """By id."""
        with self._reader() as db:
            row = db.execute("SELECT body FROM incidents WHERE id = ?", (ident,)).fetchone()
        return None if row is None else _incident_decoder.decode(row[0])

    def handling(self, idents: Sequence[str]) -> dict[str, Handling]:
        """What people did about each of these incidents, by id."""
        with self._reader() as db:
            rows = db.execute(
                f"SELECT * FROM actions WHERE incident_id IN ({','.join('?' * len(idents))})"
                " ORDER BY time, id",
                idents,
            ).fetchall()
        return by_incident(idents, map(_action, rows))

    def actions(self, before: float | None = None, limit: int = 200) -> list[Action]:
        """Return the audit log, newest first: entries with a time below ``before``."""
        with self._reader() as db:
            rows = db.execute(
                "SELECT * FROM actions WHERE ?1 IS NULL OR time < ?1"
                " ORDER BY time DESC, id DESC LIMIT ?2",
                (before, limit),
            ).fetchall()
        return [_action(row) for row in rows]

    def requests(self, query: RequestQuery) -> FoundRequests:
        """See :meth:`kvlens.dashboard.store.base.Store.requests`."""
        with self._reader() as db:
            engines = _engine_numbers(db, query)
            if engines == []:
                return FoundRequests([], None)
            with _at_most(_PATIENCE, db):
                rows = db.execute(*page_sql(query, engines)).fetchall()
        page = rows[: query.limit]
        more = len(rows) > query.limit and page
        return FoundRequests(
            [decode_record(unpack(body)) for *_, body in page],
            ORDERS[query.sort].cursor(page[-1][:-1]) if more else None,
        )

    def request(self, ident: str) -> RequestRecord | None:
        """By internal or external id; of several, the newest."""
        with self._reader() as db:
            for column in ("internal_request_id", "request_id"):
                row = db.execute(
                    f"SELECT body FROM requests JOIN bodies USING (seq) WHERE {column} = ?"
                    " ORDER BY finish_time DESC, seq DESC LIMIT 1",
                    (ident,),
                ).fetchone()
                if row is not None:
                    return decode_record(unpack(row[0]))
        return None

    def series(self, since: float, until: float, step: int, engine: str | None) -> list[Point]:
        """Sums per ``step`` seconds (a multiple of 60), oldest first, empty ones left out."""
        level = level_of(step)
        with self._reader() as db:
            numbers = (
                [schema.FLEET]
                if engine is None
                else _engine_numbers(db, RequestQuery(engine=engine)) or []
            )
            rows = db.execute(
                "SELECT slot, counters FROM sums WHERE level = ?"
                f" AND engine_no IN ({','.join('?' * len(numbers))}) AND slot BETWEEN ? AND ?",
                (level, *numbers, int(since // step) * step // level, int(until // level)),
            ).fetchall()
        return points(((slot * level, unpack_sums(text)) for slot, text in rows), step)

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        reader = self._readers.get()
        try:
            if reader is None:
                reader = schema.connect(self._path, writer=False)
            yield reader
        finally:
            self._readers.put(reader)


@contextmanager
def _at_most(seconds: float, db: sqlite3.Connection) -> Iterator[None]:
    """Give up a query after ``seconds``, so that none holds a reader for minutes."""
    deadline = time.monotonic() + seconds
    db.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if time.monotonic() <= deadline:
            raise
        raise TooSlowError(
            f"too few requests pass these filters to find them in this order within {seconds:g} "
            "seconds: narrow the time range, drop a filter, or sort by time"
        ) from error
    finally:
        db.set_progress_handler(None, 0)


def _action(row: tuple[Any, ...]) -> Action:
    return Action(**dict(zip(Action.__struct_fields__, row, strict=True)))


def _engine(row: tuple[Any, ...]) -> Engine:
    info, first_seen, last_seen, ended_at, end_reason, counters, open_incidents = row
    return Engine(
        info=decode_engine(info),
        first_seen=first_seen,
        last_seen=last_seen,
        ended_at=ended_at,
        end_reason=end_reason,
        totals=fill(Totals(), unpack_sums(counters).items() if counters else ()),
        open_incidents=open_incidents,
    )


def _engine_numbers(db: sqlite3.Connection, query: RequestQuery) -> list[int] | None:
    """Engines that the filters leave; None = no filter."""
    if query.engine is None and query.model is None:
        return None
    rows = db.execute(
        "SELECT engine_no FROM engines WHERE (?1 IS NULL OR incarnation_id = ?1 OR engine_id = ?1)"
        " AND (?2 IS NULL OR model = ?2)",
        (query.engine, query.model),
    )
    return [number for (number,) in rows]
