"""A SQLite store with any number of requests in the last 24 h, written without the dashboard.

Rows go in without indexes, which are built afterwards, as the schema has them:
ten million in minutes instead of hours. The result is what ingest would leave.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import factory
import msgspec

from kvlens.dashboard.model.batch import Batch
from kvlens.dashboard.model.incident import Incident, RequestScope
from kvlens.dashboard.store import schema
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.rollup import EVER, LEVELS, Counters, add, counters, of_fleet
from kvlens.dashboard.store.rollup import pack as pack_counters
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode
from kvlens.telemetry.semconv import QUIET_VERDICTS

ENGINES = 32
DAY = 86_400
INCIDENTS = 300
_MODELS = ("model-a", "model-b", "model-c", "model-d")
_MIX = (("served", 80), ("cold", 15), ("partial", 3), ("lost", 2))
"""Kinds of requests, per cent."""
_LENGTHS = range(1, 17)
"""Chunks of a request's prefix; all are as frequent."""


def engines(now: float) -> list[EngineInfo]:
    """The fleet: started two days ago, an eighth of it on an affected vLLM."""
    return [
        factory.engine(
            f"node-{number:02d}:0",
            f"inc-{number:02d}",
            affected=number % 8 == 0,
            started_at=now - 2 * DAY,
            model=_MODELS[number % len(_MODELS)],
        )
        for number in range(ENGINES)
    ]


def fill(path: Path, count: int, seed: int = 1) -> None:
    """Create the store with ``count`` requests that finished in the last 24 h."""
    now = time.time()
    fleet = engines(now)
    store = SqliteStore(str(path))
    store.append([Batch([(info, now - 1) for info in fleet])])
    store.save_detection(
        count, [_incident(n, fleet[n % ENGINES], now) for n in range(INCIDENTS)], []
    )
    store.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(
        "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -1000000;"
        "PRAGMA threads = 2"
    )
    numbers = dict(db.execute("SELECT incarnation_id, engine_no FROM engines"))
    kinds = [_kinds(info) for info in fleet]
    with _without_indexes(db):
        sums = _insert(
            db, count, now, [numbers[info.incarnation_id] for info in fleet], kinds, seed
        )
    _write_sums(db, sums, [numbers[info.incarnation_id] for info in fleet], kinds)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("ANALYZE")
    db.close()


def _kinds(info: EngineInfo) -> list[tuple[RequestRecord, bytes]]:
    """Requests of every kind with every length, in the order of ``_MIX``."""
    served = [factory.served_record(1, info, chunks=chunks) for chunks in _LENGTHS]
    cold = [factory.cold_record(2, info, chunks=chunks) for chunks in _LENGTHS]
    lost = [factory.lost_record(3, info, chunks=chunks) for chunks in _LENGTHS]
    partial = [
        msgspec.structs.replace(
            record,
            verdict="partial",
            served_tokens=record.servable_tokens // 2,
            lost_tokens=record.servable_tokens // 2,
        )
        for record in lost
    ]
    return [(record, pack(encode(record))) for record in (*served, *cold, *partial, *lost)]


def _insert(
    db: sqlite3.Connection,
    count: int,
    now: float,
    numbers: list[int],
    kinds: list[list[tuple[RequestRecord, bytes]]],
    seed: int,
) -> Counter[tuple[int, int, int]]:
    """Insert the rows; returns how many there are per engine, minute and kind."""
    draw = random.Random(seed)
    weights = [share for _, share in _MIX for _ in _LENGTHS]
    seen: Counter[tuple[int, int, int]] = Counter()
    rows: list[tuple[object, ...]] = []
    bodies: list[tuple[int, bytes]] = []

    def flush() -> None:
        db.execute("BEGIN")
        db.executemany("INSERT INTO requests VALUES (?,?,?,?,?,?,?,?,?,?,?)", rows)
        db.executemany("INSERT INTO bodies VALUES (?, ?)", bodies)
        db.execute("COMMIT")
        rows.clear()
        bodies.clear()

    plan = draw.choices(range(len(weights)), weights, k=100_000)
    for seq in range(1, count + 1):
        engine, kind = draw.randrange(ENGINES), plan[seq % len(plan)]
        record, body = kinds[engine][kind]
        finish = now - DAY + DAY * seq / count
        ident = f"chatcmpl-{draw.getrandbits(128):032x}"
        anomalous = int(record.verdict not in QUIET_VERDICTS)
        rows.append(
            (
                seq,
                numbers[engine],
                f"{ident}-0",
                ident,
                finish,
                record.verdict,
                record.cause,
                anomalous,
                record.lost_tokens,
                record.expected_tokens,
                record.served_tokens,
            )
        )
        bodies.append((seq, body))
        seen[engine, int(finish // 60), kind] += 1
        if len(rows) == 100_000:
            flush()
            print(f"\rfilled {seq:,} of {count:,}", end="", file=sys.stderr, flush=True)
    flush()
    print(f"\rfilled {count:,}; building indexes", file=sys.stderr)
    return seen


@contextmanager
def _without_indexes(db: sqlite3.Connection) -> Iterator[None]:
    """Drop the indexes of ``requests`` inside the block, build them at its end."""
    found = db.execute(
        "SELECT name, sql FROM sqlite_master"
        " WHERE type = 'index' AND tbl_name = 'requests' AND sql IS NOT NULL"
    ).fetchall()
    for name, _ in found:
        db.execute(f"DROP INDEX {name}")
    yield
    for _, sql in found:
        db.execute(sql)


def _write_sums(
    db: sqlite3.Connection,
    seen: Counter[tuple[int, int, int]],
    numbers: list[int],
    kinds: list[list[tuple[RequestRecord, bytes]]],
) -> None:
    slots: dict[tuple[int, int, int], Counters] = {}
    for (engine, minute, kind), times in seen.items():
        pairs = list(_times(kinds[engine][kind][0], times))
        add(slots.setdefault((EVER, numbers[engine], 0), {}), pairs)
        fleet = list(of_fleet(dict(pairs)).items())
        for level in LEVELS:
            for number, more in ((numbers[engine], pairs), (schema.FLEET, fleet)):
                add(slots.setdefault((level, number, minute * 60 // level), {}), more)
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO sums VALUES (?, ?, ?, ?)",
        ((*slot, pack_counters(found)) for slot, found in slots.items()),
    )
    db.execute("COMMIT")


def _times(record: RequestRecord, times: int) -> Iterator[tuple[str, float]]:
    for key, value in counters(record):
        yield key, value * times


def _incident(number: int, info: EngineInfo, now: float) -> Incident:
    is_open = number < 6
    since = now - DAY * (number + 1) / INCIDENTS
    return Incident(
        id=f"zero_hit-{number:012x}",
        kind="zero_hit",
        severity="critical",
        state="open" if is_open else "closed",
        engine_id=info.engine_id,
        incarnation_id=info.incarnation_id,
        model=info.model,
        opened_at=since + 1,
        updated_at=since + 3600,
        closed_at=None if is_open else since + 3600,
        close_reason=None if is_open else "recovered",
        verdict="lost",
        cause="drafter_fallback",
        confidence="certain",
        summary="Requests were served nothing",
        evidence={},
        next_step="",
        groups=[1],
        example_requests=[],
        lost_tokens=4096 * 50,
        requests=50,
        scope=RequestScope(
            since=since, until=since + 3600, min_expected_tokens=512, max_served_tokens=0
        ),
    )
