"""The store for many dashboards and much data: ClickHouse, alone or a cluster of it."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvlens.dashboard.model.actions import Action, Handling, by_incident
from kvlens.dashboard.model.batch import Appended, Batch
from kvlens.dashboard.model.engine import SILENT, Engine
from kvlens.dashboard.model.incident import CLOSED, Incident
from kvlens.dashboard.model.query import FoundRequests, RequestQuery
from kvlens.dashboard.model.totals import Point, Totals
from kvlens.dashboard.store.base import DetectionState, StoreError, Upkeep
from kvlens.dashboard.store.clickhouse_append import (
    ClickHouseAppender,
    engine_states,
    read_info,
    silence,
)
from kvlens.dashboard.store.clickhouse_http import Http, quoted
from kvlens.dashboard.store.clickhouse_lease import Lease
from kvlens.dashboard.store.clickhouse_query import bodies, find, incident_conditions
from kvlens.dashboard.store.clickhouse_schema import FLEET, migrate
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget
from kvlens.dashboard.store.order import ORDERS
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.dashboard.store.rollup import EVER, fill, level_of, of_fleet, points
from kvlens.telemetry.records import EngineInfo, RequestRecord, decode_record

_PRUNE_EVERY: Final = 3600.0
_ACTION_FIELDS: Final = ", ".join(Action.__struct_fields__)
_incident_decoder = msgspec.json.Decoder(Incident)


class ClickHouseStore:
    """See :class:`kvlens.dashboard.store.base.Store`; several processes may use one database."""

    shared: Final = True

    def __init__(self, target: ClickHouseTarget, limits: RetentionLimits) -> None:
        """Create or migrate the tables; raises :class:`StoreError`. Sizes are not limited here."""
        self._http = Http(target)
        self._db = target.database
        self._limits = limits
        self._pruned_at = 0.0
        try:
            migrate(self._http, target, limits)
            self._appender = ClickHouseAppender(self._http, self._db)
        except BaseException:
            self._http.close()
            raise
        self._lease = Lease(self._http, f"{self._db}.dashboards")

    def close(self) -> None:
        """Give up leadership and close connections; no call may follow."""
        try:
            self._lease.leave()
        except StoreError:
            pass  # the others notice by themselves
        finally:
            self._http.close()

    # --- the writer thread ------------------------------------------------------

    def append(self, batches: Sequence[Batch]) -> Appended:
        """Make all batches durable, then return."""
        return self._appender.append(batches)

    def maintain(self, now: float) -> Upkeep:
        """Old requests and sums go by TTL; delete old closed incidents, hourly."""
        if now - self._pruned_at >= _PRUNE_EVERY and self._lease.valid:
            self._pruned_at = now
            old = self._http.query(
                f"SELECT id FROM {self._db}.incidents FINAL WHERE state = '{CLOSED}'"
                " AND closed_at < {cutoff:Float64} LIMIT 10000",
                cutoff=now - self._limits.request_age,
            )
            if old:
                # Not by TTL: that could delete the newest version of a row before the others.
                self._http.command(
                    f"ALTER TABLE {self._db}.incidents DELETE WHERE id IN"
                    f" ({quoted(ident for (ident,) in old)}) SETTINGS mutations_sync = 1"
                )
        return Upkeep()

    # --- the thread that detects ------------------------------------------------

    def lead(self) -> bool:
        """Whether this dashboard runs the detectors, for now."""
        return self._lease.lead()

    def silence(self, heard_before: float) -> list[tuple[str, float]]:
        """End engines of which no dashboard heard since then; see :class:`Store`."""
        return silence(self._http, self._db, heard_before)

    def incarnations(self) -> list[tuple[EngineInfo, float | None]]:
        """All engines, and when each ended for good."""
        return [(info, at) for _, info, at in engine_states(self._http, self._db)]

    def seqs_after(self, seq: int) -> list[int]:
        """All higher ones."""
        rows = self._http.query(
            f"SELECT seq FROM {self._db}.requests WHERE seq > {seq} ORDER BY seq"
        )
        return [number for (number,) in rows]

    def records_at(self, seqs: Sequence[int]) -> list[tuple[int, RequestRecord]]:
        """Records with these ``seq``, in its order."""
        if not seqs:
            return []
        return self._records(
            f"seq BETWEEN {min(seqs)} AND {max(seqs)} AND seq IN ({', '.join(map(str, seqs))})",
            len(seqs),
        )

    def deferrals_after(self, seq: int) -> list[tuple[int, RequestRecord]]:
        """Reports of waiting requests with a higher ``seq``, in its order."""
        rows = self._http.query(
            f"SELECT seq, body FROM {self._db}.deferrals WHERE seq > {seq} ORDER BY seq LIMIT 10000"
        )
        return [(number, decode_record(body)) for number, body in rows]

    def save_detection(
        self,
        checkpoint: int,
        incidents: Sequence[Incident],
        states: Sequence[tuple[str, str, bytes | None]],
    ) -> None:
        """Keep incidents, then detector states with the checkpoint; None deletes a state.

        A crash between the two finds the same incidents again, with the same ids.
        """
        version = time.time_ns()
        self._http.insert(
            f"{self._db}.incidents",
            [
                {
                    "id": i.id,
                    "incarnation_id": i.incarnation_id,
                    "state": i.state,
                    "opened_at": i.opened_at,
                    "closed_at": i.closed_at,
                    "changed_at": time.time(),
                    "body": msgspec.json.encode(i).decode(),
                    "version": version,
                }
                for i in incidents
            ],
        )
        rows = [("", "", str(checkpoint).encode()), *states]
        self._http.insert(
            f"{self._db}.detection",
            [
                {
                    "detector": detector,
                    "key": key,
                    "state": base64.b64encode(state or b"").decode(),
                    "deleted": int(state is None),
                    "version": version,
                }
                for detector, key, state in rows
            ],
        )

    def load_detection(self) -> DetectionState:
        """Return what :meth:`save_detection` kept last."""
        rows = self._http.query(
            f"SELECT detector, key, state FROM {self._db}.detection FINAL WHERE deleted = 0"
        )
        states = [(detector, key, base64.b64decode(state)) for detector, key, state in rows]
        checkpoint = next((state for detector, _, state in states if not detector), b"0")
        return DetectionState(int(checkpoint), [state for state in states if state[0]])

    # --- any thread -------------------------------------------------------------

    def records_after(self, seq: int, limit: int) -> list[tuple[int, RequestRecord]]:
        """Records with a higher ``seq``, in its order."""
        return self._records(f"seq > {seq}", limit)

    def engines(self) -> list[Engine]:
        """All incarnations, newest start first."""
        return self._engines("1 = 1")

    def engine(self, ident: str) -> Engine | None:
        """By incarnation id, or the newest incarnation of an engine id."""
        infos = [info for _, info, _ in engine_states(self._http, self._db)]
        exact = [info for info in infos if info.incarnation_id == ident]
        found = exact or [info for info in infos if info.engine_id == ident]
        if not found:
            return None
        newest = max(found, key=lambda info: info.started_at)
        return next(
            iter(self._engines(f"incarnation_id = {quoted([newest.incarnation_id])}")), None
        )

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
        where, params = incident_conditions(f"{self._db}.actions", state, engine, at, changed_since)
        rows = self._http.query(
            f"SELECT body FROM {self._db}.incidents FINAL WHERE {where}"
            " ORDER BY opened_at DESC, id" + ("" if limit is None else f" LIMIT {limit}"),
            **params,
        )
        return [_incident_decoder.decode(body) for (body,) in rows]

    def incident(self, ident: str) -> Incident | None:
        """By id."""
        rows = self._http.query(
            f"SELECT body FROM {self._db}.incidents FINAL WHERE id = {{id:String}}", id=ident
        )
        return _incident_decoder.decode(rows[0][0]) if rows else None

    def handling(self, idents: Sequence[str]) -> dict[str, Handling]:
        """What people did about each of these incidents, by id."""
        rows = self._http.query(
            f"SELECT {_ACTION_FIELDS} FROM {self._db}.actions FINAL"
            f" WHERE incident_id IN ({quoted(idents)}) ORDER BY time, id"
        )
        return by_incident(idents, map(_action, rows))

    def actions(self, before: float | None = None, limit: int = 200) -> list[Action]:
        """Return the audit log, newest first: entries with a time below ``before``."""
        where = "" if before is None else f" WHERE time < {float(before)!r}"
        rows = self._http.query(
            f"SELECT {_ACTION_FIELDS} FROM {self._db}.actions FINAL{where}"
            f" ORDER BY time DESC, id DESC LIMIT {limit}"
        )
        return [_action(row) for row in rows]

    def requests(self, query: RequestQuery) -> FoundRequests:
        """One page; raises ``ValueError`` for a cursor that is not ours."""
        table = f"{self._db}.requests"
        keys = find(self._http, table, query)
        page = keys[: query.limit]
        records = [decode_record(body) for body in bodies(self._http, table, page)]
        more = len(keys) > query.limit and page
        return FoundRequests(records, ORDERS[query.sort].cursor(page[-1]) if more else None)

    def request(self, ident: str) -> RequestRecord | None:
        """By internal or external id; of several, the newest."""
        for column in ("internal_request_id", "request_id"):
            rows = self._http.query(
                f"SELECT body FROM {self._db}.requests WHERE {column} = {{id:String}}"
                " ORDER BY finish_time DESC, seq DESC LIMIT 1",
                id=ident,
            )
            if rows:
                return decode_record(rows[0][0])
        return None

    def series(self, since: float, until: float, step: int, engine: str | None) -> list[Point]:
        """Sums per ``step`` seconds (a multiple of 60), oldest first, empty ones left out."""
        level = level_of(step)
        names = [FLEET]
        if engine is not None:
            infos = (info for _, info, _ in engine_states(self._http, self._db))
            names = [i.incarnation_id for i in infos if engine in (i.incarnation_id, i.engine_id)]
            if not names:
                return []
        rows = self._http.query(
            f"SELECT slot, sumMap(counters) FROM {self._db}.sums WHERE level = {level}"
            f" AND incarnation_id IN ({quoted(names)})"
            f" AND slot BETWEEN {int(since // step) * step // level} AND {int(until // level)}"
            " GROUP BY slot"
        )
        return points(
            ((slot * level, of_fleet(sums) if engine is None else sums) for slot, sums in rows),
            step,
        )

    def _records(self, where: str, limit: int) -> list[tuple[int, RequestRecord]]:
        rows = self._http.query(
            f"SELECT seq, body FROM {self._db}.requests WHERE {where}"
            f" ORDER BY seq LIMIT 1 BY finish_time, row_id LIMIT {limit}"
        )
        return [(seq, decode_record(body)) for seq, body in rows]

    def _engines(self, where: str) -> list[Engine]:
        rows = self._http.query(
            "SELECT incarnation_id, max(info), min(first_seen), max(last_seen), min(ended_at),"
            " max(end_reason), max(heard_at), max(silent_at)"
            f" FROM {self._db}.engines WHERE {where} GROUP BY incarnation_id"
        )
        totals = dict(
            self._http.query(
                f"SELECT incarnation_id, sumMap(counters) FROM {self._db}.sums"
                f" WHERE level = {EVER} AND {where} GROUP BY incarnation_id"
            )
        )
        open_incidents = dict(
            self._http.query(
                f"SELECT incarnation_id, count() FROM {self._db}.incidents FINAL"
                f" WHERE state = 'open' AND {where} GROUP BY incarnation_id"
            )
        )
        found = [
            Engine(
                info=read_info(info),
                first_seen=first_seen,
                last_seen=last_seen,
                ended_at=max(last_seen, heard_at)
                if ended_at is None and silent_at > heard_at
                else ended_at,
                end_reason=reason or (SILENT if silent_at > heard_at else None),
                totals=fill(Totals(), totals.get(ident, {}).items()),
                open_incidents=open_incidents.get(ident, 0),
            )
            for ident, info, first_seen, last_seen, ended_at, reason, heard_at, silent_at in rows
            if info
        ]
        return sorted(found, key=lambda e: (e.info.started_at, e.first_seen), reverse=True)


def _action(row: list[Any]) -> Action:
    return Action(**dict(zip(Action.__struct_fields__, row, strict=True)))
