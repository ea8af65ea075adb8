"""The write side of the ClickHouse store, on the writer thread."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from kvlens.dashboard.model.batch import Appended, Batch, RecordRow
from kvlens.dashboard.model.engine import REPLACED, STOPPED
from kvlens.dashboard.store.clickhouse_http import Http
from kvlens.dashboard.store.clickhouse_query import row_id
from kvlens.dashboard.store.codec import unpack
from kvlens.dashboard.store.rollup import counters
from kvlens.telemetry.records import EngineInfo, RequestRecord, decode_engine, encode
from kvlens.telemetry.semconv import ENGINE_STOPPED

_SEEN_EVERY: Final = 10.0
"""Seconds, by its clock or ours, after which an engine's signs of life are written again."""
_VERSION_DIGITS: Final = 20


class ClickHouseAppender:
    """Appends batches; what it knows of engines is read again when a stranger appears."""

    def __init__(self, http: Http, database: str) -> None:
        self._http = http
        self._database = database
        self._infos: dict[str, EngineInfo] = {}
        self._ended: set[str] = set()
        self._last_seen: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._seq = 0
        self._reload()

    def append(self, batches: Sequence[Batch]) -> Appended:
        """Make all batches durable, then return.

        There is no transaction over several tables: engines come first, so that no
        request lacks its engine, and whatever follows may be sent again.
        """
        known = self._infos.keys() | {i.incarnation_id for b in batches for i, _ in b.engines}
        for batch in batches:
            for row in batch.rows:
                if row.record.incarnation_id not in known:
                    raise KeyError(row.record.incarnation_id)
        ended, touched = self._engines(batches)
        fresh, total = self._fresh(batches)
        self._insert_requests(fresh)
        actions = [action for batch in batches for action in batch.actions]
        self._http.insert(f"{self._database}.actions", [msgspec.to_builtins(a) for a in actions])
        waiting = [record for batch in batches for record in batch.deferrals]
        self._http.insert(
            f"{self._database}.deferrals",
            [{"seq": self._next(), "body": encode(record)} for record in waiting],
        )
        records = [(seq, row.record) for seq, row in fresh]
        acted_on = [action.incident_id for action in actions]
        return Appended(records, total - len(fresh), touched, ended, acted_on)

    # --- engines ----------------------------------------------------------------

    def _engines(self, batches: Sequence[Batch]) -> tuple[list[tuple[str, float]], frozenset[str]]:
        rows: list[dict[str, Any]] = []
        ended: list[tuple[str, float]] = []
        touched: set[str] = set()

        def end(incarnation: str, at: float, reason: str) -> None:
            if incarnation not in self._ended:
                ended.append((incarnation, at))
                rows.append(_engine_row(incarnation, at, ended_at=at, reason=reason))
                self._ended.add(incarnation)

        try:
            for batch in batches:
                for info, at in batch.engines:
                    touched.add(info.incarnation_id)
                    for old in self._register(info, at, rows):
                        end(old, info.started_at, REPLACED)
                for event in batch.events:
                    if event.state == ENGINE_STOPPED:
                        end(event.incarnation_id, event.time, STOPPED)
            self._http.insert(f"{self._database}.engines", rows)
        except BaseException:
            self._reload()
            raise
        return ended, frozenset(touched)

    def _register(self, info: EngineInfo, at: float, rows: list[dict[str, Any]]) -> list[str]:
        """Note a sign of life; returns the incarnations that this one replaces."""
        ident = info.incarnation_id
        if ident not in self._infos:
            self._reload()  # another dashboard may know it, and what it replaces
        known = self._infos.get(ident)
        changed = known != info
        now = time.time()
        if (
            not changed
            and at < self._last_seen.get(ident, 0.0) + _SEEN_EVERY
            and now < self._heard_at.get(ident, 0.0) + _SEEN_EVERY
        ):
            return []
        self._infos[ident] = info
        self._heard_at[ident] = now
        self._last_seen[ident] = max(at, self._last_seen.get(ident, 0.0))
        rows.append(_engine_row(ident, at, info=info if changed else None, heard_at=now))
        if known is not None:
            return []
        return [
            other.incarnation_id
            for other in self._infos.values()
            if (other.engine_id, other.dp_rank, other.host)
            == (info.engine_id, info.dp_rank, info.host)
            and other.started_at < info.started_at
        ]

    def _reload(self) -> None:
        self._last_seen.clear()
        self._heard_at.clear()
        self._infos.clear()
        self._ended.clear()
        for ident, info, ended_at in engine_states(self._http, self._database):
            self._infos[ident] = info
            if ended_at is not None:
                self._ended.add(ident)

    # --- requests ---------------------------------------------------------------

    def _fresh(self, batches: Sequence[Batch]) -> tuple[list[tuple[int, RecordRow]], int]:
        """Rows that are not there yet, each with a new ``seq``; and how many came."""
        rows: dict[int, RecordRow] = {}
        total = 0
        for row in (row for batch in batches for row in batch.rows):
            total += 1
            rows.setdefault(row_id(row.record.incarnation_id, row.record.internal_request_id), row)
        there = self._there(rows)
        return [(self._next(), row) for ident, row in rows.items() if ident not in there], total

    def _there(self, rows: dict[int, RecordRow]) -> set[int]:
        if not rows:
            return set()
        times = [row.record.finish_time for row in rows.values()]
        found = self._http.query(
            f"SELECT row_id FROM {self._database}.requests"
            " WHERE finish_time BETWEEN {first:Float64} AND {last:Float64}"
            f" AND row_id IN ({', '.join(map(str, rows))})",
            first=min(times),
            last=max(times),
        )
        return {ident for (ident,) in found}

    def _insert_requests(self, fresh: Iterable[tuple[int, RecordRow]]) -> None:
        rows = [_request_row(seq, row) for seq, row in fresh]
        token = hashlib.sha256(",".join(sorted(str(r["row_id"]) for r in rows)).encode())
        self._http.insert(
            f"{self._database}.requests",
            rows,
            # The same rows sent again, by us or by another dashboard, change neither table.
            insert_deduplication_token=token.hexdigest(),
            deduplicate_blocks_in_dependent_materialized_views=1,
            distributed_foreground_insert=1,
            max_partitions_per_insert_block=0,
        )

    def _next(self) -> int:
        """A number that only grows, here and, as far as clocks agree, everywhere."""
        self._seq = max(self._seq + 1, time.time_ns())
        return self._seq


def engine_states(http: Http, database: str) -> list[tuple[str, EngineInfo, float | None]]:
    """``(incarnation id, engine, when it ended)`` of all incarnations."""
    rows = http.query(
        f"SELECT incarnation_id, max(info), min(ended_at) FROM {database}.engines"
        " GROUP BY incarnation_id"
    )
    return [(ident, read_info(info), ended_at) for ident, info, ended_at in rows if info]


def read_info(text: str) -> EngineInfo:
    """Engine of the ``info`` column, whose largest text is the newest version."""
    return decode_engine(text[_VERSION_DIGITS:])


def silence(http: Http, database: str, heard_before: float) -> list[tuple[str, float]]:
    """See :meth:`kvlens.dashboard.store.base.Store.silence`."""
    found = http.query(
        "SELECT incarnation_id, max(last_seen), greatest(max(last_seen), max(heard_at))"
        f" FROM {database}.engines GROUP BY incarnation_id"
        " HAVING max(info) != '' AND min(ended_at) IS NULL AND max(silent_at) <= max(heard_at)"
        " AND max(heard_at) < {heard_before:Float64}",
        heard_before=heard_before,
    )
    rows = [_engine_row(ident, seen, silent_at=heard_before) for ident, seen, _ in found]
    http.insert(f"{database}.engines", rows)
    return [(ident, at) for ident, _, at in found]


def _engine_row(
    ident: str,
    at: float,
    *,
    info: EngineInfo | None = None,
    ended_at: float | None = None,
    reason: str = "",
    heard_at: float = 0.0,
    silent_at: float = 0.0,
) -> dict[str, Any]:
    return {
        "incarnation_id": ident,
        "info": "" if info is None else f"{time.time_ns():0{_VERSION_DIGITS}d}{encode(info)}",
        "first_seen": at,
        "last_seen": at,
        "ended_at": ended_at,
        "end_reason": reason,
        "heard_at": heard_at,
        "silent_at": silent_at,
    }


def _request_row(seq: int, row: RecordRow) -> dict[str, Any]:
    record: RequestRecord = row.record
    sums: dict[str, float] = {}
    for key, value in counters(record):
        sums[key] = sums.get(key, 0.0) + value
    return {
        "finish_time": record.finish_time,
        "row_id": row_id(record.incarnation_id, record.internal_request_id),
        "seq": seq,
        "incarnation_id": record.incarnation_id,
        "engine_id": record.engine_id,
        "model": record.model,
        "internal_request_id": record.internal_request_id,
        "request_id": record.request_id,
        "verdict": record.verdict,
        "cause": record.cause or "",
        "lost_tokens": record.lost_tokens,
        "expected_tokens": record.expected_tokens,
        "served_tokens": record.served_tokens,
        "counters": sums,
        "body": unpack(row.body).decode(),
    }
