"""The SQLite file: its schema, how an older one becomes today's, and who may open it."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Final

from kvlens.dashboard.store.base import StoreError

APPLICATION_ID: Final = 0x6B766C6E  # "kvln"
FLEET: Final = 0
"""``engine_no`` of the sums over all engines."""

MIGRATIONS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE engines (
        engine_no INTEGER PRIMARY KEY,
        incarnation_id TEXT NOT NULL UNIQUE,
        engine_id TEXT NOT NULL,
        dp_rank INTEGER NOT NULL,
        host TEXT NOT NULL,
        model TEXT NOT NULL,
        started_at REAL NOT NULL,
        first_seen REAL NOT NULL,
        last_seen REAL NOT NULL,
        ended_at REAL,
        end_reason TEXT,
        info TEXT NOT NULL
    );
    CREATE INDEX engines_by_id ON engines (engine_id, started_at);

    -- What requests are found by; AUTOINCREMENT, since detection's checkpoint
    -- relies on a seq never coming back.
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        engine_no INTEGER NOT NULL,
        internal_request_id TEXT NOT NULL,
        request_id TEXT NOT NULL,
        finish_time REAL NOT NULL,
        verdict TEXT NOT NULL,
        cause TEXT,
        anomalous INTEGER NOT NULL,
        lost_tokens INTEGER NOT NULL,
        expected_tokens INTEGER NOT NULL,
        served_tokens INTEGER NOT NULL
    );
    CREATE UNIQUE INDEX requests_once ON requests (internal_request_id, engine_no);
    CREATE INDEX requests_by_external_id ON requests (request_id);
    CREATE INDEX requests_by_time ON requests (finish_time);
    CREATE INDEX requests_by_engine ON requests (engine_no, finish_time);
    CREATE INDEX requests_by_verdict ON requests (verdict, finish_time);
    CREATE INDEX requests_by_cause ON requests (cause, finish_time) WHERE cause IS NOT NULL;
    CREATE INDEX anomalous_by_time ON requests (finish_time) WHERE anomalous = 1;
    CREATE INDEX anomalous_by_engine ON requests (engine_no, finish_time) WHERE anomalous = 1;

    -- Apart from the narrow table, so that a filter never reads a body it drops.
    CREATE TABLE bodies (seq INTEGER PRIMARY KEY, body BLOB NOT NULL);

    CREATE TABLE rollups (
        engine_no INTEGER NOT NULL,
        minute INTEGER NOT NULL,
        key TEXT NOT NULL,
        value REAL NOT NULL,
        PRIMARY KEY (engine_no, minute, key)
    ) WITHOUT ROWID;
    CREATE TABLE totals (
        engine_no INTEGER NOT NULL,
        key TEXT NOT NULL,
        value REAL NOT NULL,
        PRIMARY KEY (engine_no, key)
    ) WITHOUT ROWID;

    CREATE TABLE incidents (
        id TEXT PRIMARY KEY,
        incarnation_id TEXT NOT NULL,
        state TEXT NOT NULL,
        opened_at REAL NOT NULL,
        closed_at REAL,
        changed_at REAL NOT NULL,
        body TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX incidents_by_time ON incidents (opened_at);
    CREATE INDEX incidents_by_change ON incidents (changed_at);
    CREATE INDEX incidents_open ON incidents (incarnation_id) WHERE state = 'open';

    CREATE TABLE detection (
        detector TEXT NOT NULL,
        incarnation_id TEXT NOT NULL,
        state BLOB NOT NULL,
        PRIMARY KEY (detector, incarnation_id)
    ) WITHOUT ROWID;
    CREATE TABLE checkpoint (only INTEGER PRIMARY KEY CHECK (only = 1), seq INTEGER NOT NULL);
    INSERT INTO checkpoint VALUES (1, 0);
    """,
    """
    -- Columns in the order of store.actions.Action.
    CREATE TABLE actions (
        id TEXT PRIMARY KEY,
        incident_id TEXT NOT NULL,
        time REAL NOT NULL,
        kind TEXT NOT NULL,
        who TEXT NOT NULL,
        address TEXT NOT NULL,
        text TEXT NOT NULL,
        until REAL
    ) WITHOUT ROWID;
    CREATE INDEX actions_by_incident ON actions (incident_id, time);
    CREATE INDEX actions_by_time ON actions (time);
    """,
    """
    -- counters is a JSON object; slot counts level seconds since 1970, level 0 is all time.
    CREATE TABLE sums (
        level INTEGER NOT NULL,
        engine_no INTEGER NOT NULL,
        slot INTEGER NOT NULL,
        counters TEXT NOT NULL,
        PRIMARY KEY (level, engine_no, slot)
    ) WITHOUT ROWID;
    INSERT INTO sums SELECT 60, engine_no, minute, json_group_object(key, value)
        FROM rollups GROUP BY engine_no, minute;
    INSERT INTO sums SELECT 3600, engine_no, hour, json_group_object(key, value) FROM (
        SELECT engine_no, minute / 60 AS hour, key, sum(value) AS value
        FROM rollups GROUP BY engine_no, hour, key
    ) GROUP BY engine_no, hour;
    INSERT INTO sums SELECT 0, engine_no, 0, json_group_object(key, value)
        FROM totals GROUP BY engine_no;
    DROP TABLE rollups;
    DROP TABLE totals;
    """,
    """
    -- By the dashboard's clock, which no engine can turn back.
    ALTER TABLE engines ADD COLUMN heard_at REAL NOT NULL DEFAULT 0;
    """,
    """
    -- For pages sorted by tokens; engine and verdict save most filters a look at the table.
    CREATE INDEX requests_by_lost_tokens
        ON requests (lost_tokens, finish_time, engine_no, verdict) WHERE lost_tokens > 0;
    CREATE INDEX requests_by_served_tokens
        ON requests (served_tokens, finish_time, engine_no, verdict) WHERE served_tokens > 0;
    CREATE INDEX requests_by_expected_tokens
        ON requests (expected_tokens, finish_time, engine_no, verdict) WHERE expected_tokens > 0;
    """,
)
"""Script ``n`` takes a file from ``user_version`` n to n + 1; never edited once released."""


def connect(path: str, *, writer: bool) -> sqlite3.Connection:
    """Open one connection, usable from any thread, one at a time."""
    db = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    if writer:
        # Before the first table, or it has no effect.
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        # An acknowledged batch survives a power cut too; group commit pays for it.
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA journal_size_limit = 67108864")
    else:
        db.execute("PRAGMA query_only = 1")
    db.execute("PRAGMA cache_size = -32768")
    return db


def open_writer(path: str) -> sqlite3.Connection:
    """Open the file for writing, create or migrate it; raises :class:`StoreError`."""
    db: sqlite3.Connection | None = None
    try:
        db = connect(path, writer=True)
        _check(db, path)
        _migrate(db)
    except BaseException as error:
        if db is not None:
            db.close()  # rolls back
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"store {path}: {error}; name another with --store") from error
        raise
    return db


def _check(db: sqlite3.Connection, path: str) -> None:
    application, version = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise StoreError(f"store {path} belongs to another program: name another file")
    if version > len(MIGRATIONS):
        raise StoreError(
            f"store {path} has schema {version}, written by a newer kvlens; this one knows up "
            f"to {len(MIGRATIONS)}: upgrade kvlens or name another file"
        )


def _migrate(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        # One script, one transaction: a crash leaves the old version or the new one.
        db.executescript(
            f"BEGIN IMMEDIATE; {script}; PRAGMA application_id = {APPLICATION_ID};"
            f"PRAGMA user_version = {number}; COMMIT;"
        )


def lock(path: str) -> int:
    """Take the file for this process; the lock goes with the returned descriptor.

    Creates missing folders. Raises :class:`StoreError`.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Request ids may be personal data: readable by the owner alone.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreError(f"store {path}: {error.strerror}; name another with --store") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"store {path} is in use by another dashboard: stop that one or name another file"
        ) from error
    return descriptor
