"""The tables in ClickHouse, alone or over a cluster, and how older ones become today's.

In a cluster, ``requests`` and ``sums`` are sharded by engine incarnation: each has
a replicated ``…_local`` table per shard and a Distributed table of its own name over
them. Everything else is small and replicated to every node, so that any of them
answers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.clickhouse_http import Http
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.dashboard.store.rollup import EVER, HOUR, MINUTE

FLEET: Final = ""
"""``incarnation_id`` of the sums over all engines."""
_END_OF_TIME: Final = 4_294_967_295
"""Largest DateTime: times beyond it are kept for ever instead of wrapping around."""
_WINDOW: Final = 10_000
"""Inserts whose tokens are remembered."""


class Ddl:
    """Writes statements for one target."""

    def __init__(self, target: ClickHouseTarget, limits: RetentionLimits) -> None:
        self.database = target.database
        self._target = target
        self._limits = limits
        self._on_cluster = f" ON CLUSTER '{target.cluster}'" if target.cluster else ""

    def local(self, table: str) -> str:
        """Name of the table that holds the rows of ``table`` on one shard."""
        return f"{self.database}.{table}{'_local' if self._target.cluster else ''}"

    def create_database(self) -> str:
        """For a server where it does not exist."""
        return f"CREATE DATABASE IF NOT EXISTS {self.database}{self._on_cluster}"

    def everywhere(self, table: str, columns: str, engine: str, rest: str) -> list[str]:
        """A small table; in a cluster all nodes are replicas of one."""
        path = f"/clickhouse/tables/all/{self.database}/{table}"
        return [self._create(f"{self.database}.{table}", columns, engine, rest, path, "{shard}-")]

    def sharded(self, table: str, columns: str, engine: str, rest: str) -> list[str]:
        """A large table."""
        path = f"/clickhouse/tables/{{shard}}/{self.database}/{table}"
        made = [self._create(self.local(table), columns, engine, rest, path, "")]
        if self._target.cluster:
            made.append(
                f"CREATE TABLE IF NOT EXISTS {self.database}.{table}{self._on_cluster}"
                f" AS {self.local(table)} ENGINE = Distributed('{self._target.cluster}',"
                f" '{self.database}', '{table}_local', cityHash64(incarnation_id))"
            )
        return made

    def alter(self, table: str, change: str) -> str:
        """Change a small table on all nodes."""
        return f"ALTER TABLE {self.database}.{table}{self._on_cluster} {change}"

    def view(self, name: str, into: str, select: str) -> str:
        """A materialised view, on each shard for itself."""
        return (
            f"CREATE MATERIALIZED VIEW IF NOT EXISTS {self.database}.{name}{self._on_cluster}"
            f" TO {self.local(into)} AS {select}"
        )

    def deduplicated(self, extra: str = "") -> str:
        """Settings of a table that an insert with a known token does not change."""
        # A replica stands for the disk in a cluster; alone, the disk has to be asked.
        disk = "" if self._target.cluster else ", fsync_after_insert = 1"
        return (
            f"SETTINGS replicated_deduplication_window = {_WINDOW},"
            f" non_replicated_deduplication_window = {_WINDOW}{disk}{extra}"
        )

    def ttl(self, table: str, is_sharded: bool = False) -> str:
        """Give an existing table the TTL of today's settings."""
        name = self.local(table) if is_sharded else f"{self.database}.{table}"
        return (
            f"ALTER TABLE {name}{self._on_cluster} MODIFY {self.ttls[table]}"
            " SETTINGS materialize_ttl_after_modify = 0"
        )

    @property
    def ttls(self) -> dict[str, str]:
        """TTL clauses by table."""
        requests, sums = int(self._limits.request_age), int(self._limits.rollup_age)
        age = f"if(level = {MINUTE}, {requests}, {sums})"
        return {
            "requests": _ttl(f"finish_time + {requests}"),
            "sums": f"{_ttl(f'slot * level + {age}')} DELETE WHERE level > {EVER}",
            "actions": _ttl(f"time + {sums}"),
        }

    def _create(
        self, name: str, columns: str, engine: str, rest: str, path: str, replica: str
    ) -> str:
        kind, _, arguments = engine.partition("(")
        arguments = arguments.rstrip(")")
        if self._target.cluster:
            kind = f"Replicated{kind}"
            arguments = ", ".join(filter(None, [f"'{path}', '{replica}{{replica}}'", arguments]))
        return (
            f"CREATE TABLE IF NOT EXISTS {name}{self._on_cluster} ({columns})"
            f" ENGINE = {kind}({arguments}) {rest}"
        )


def _ttl(seconds: str) -> str:
    return f"TTL toDateTime(least({seconds}, {_END_OF_TIME}))"


def _first(ddl: Ddl) -> list[str]:
    keys = (
        f"[({MINUTE}, '{FLEET}'), ({HOUR}, '{FLEET}'), ({MINUTE}, incarnation_id),"
        f" ({HOUR}, incarnation_id), ({EVER}, incarnation_id)]"
    )
    return [
        *ddl.sharded(
            "requests",
            "finish_time Float64, row_id Int64, seq Int64,"
            " incarnation_id LowCardinality(String), engine_id LowCardinality(String),"
            " model LowCardinality(String), internal_request_id String, request_id String,"
            " verdict LowCardinality(String), cause LowCardinality(String),"
            " lost_tokens Int64, expected_tokens Int64, served_tokens Int64,"
            " counters Map(LowCardinality(String), Float64), body String CODEC(ZSTD(3)),"
            " INDEX by_internal_id internal_request_id TYPE bloom_filter(0.001),"
            " INDEX by_external_id request_id TYPE bloom_filter(0.001),"
            " INDEX by_seq seq TYPE minmax, INDEX by_incarnation incarnation_id TYPE set(64),"
            " INDEX by_verdict verdict TYPE set(16), INDEX by_cause cause TYPE set(16),"
            " INDEX by_loss lost_tokens TYPE minmax",
            "ReplacingMergeTree",
            "PARTITION BY toDate(toDateTime(least(finish_time, 4294967295)))"
            f" ORDER BY (finish_time, row_id) {ddl.ttls['requests']}"
            f" {ddl.deduplicated(', ttl_only_drop_parts = 1, index_granularity = 512')}",
        ),
        *ddl.sharded(
            "sums",
            "level UInt32, incarnation_id LowCardinality(String), slot Int64,"
            " counters SimpleAggregateFunction(sumMap, Map(String, Float64))",
            "AggregatingMergeTree",
            f"ORDER BY (level, incarnation_id, slot) {ddl.ttls['sums']} {ddl.deduplicated()}",
        ),
        ddl.view(
            "sums_of_requests",
            "sums",
            "SELECT tupleElement(key, 1) AS level, tupleElement(key, 2) AS incarnation_id,"
            " if(level = 0, 0, intDiv(toInt64(floor(finish_time)), greatest(level, 1))) AS slot,"
            " sumMap(CAST(counters, 'Map(String, Float64)')) AS counters"
            f" FROM (SELECT finish_time, counters, arrayJoin({keys}) AS key"
            f" FROM {ddl.local('requests')})"
            " GROUP BY level, incarnation_id, slot",
        ),
        *ddl.everywhere(
            "engines",
            "incarnation_id String, info SimpleAggregateFunction(max, String),"
            " first_seen SimpleAggregateFunction(min, Float64),"
            " last_seen SimpleAggregateFunction(max, Float64),"
            " ended_at SimpleAggregateFunction(min, Nullable(Float64)),"
            " end_reason SimpleAggregateFunction(max, String)",
            "AggregatingMergeTree",
            "ORDER BY incarnation_id",
        ),
        *ddl.everywhere(
            "incidents",
            "id String, incarnation_id String, state LowCardinality(String), opened_at Float64,"
            " closed_at Nullable(Float64), changed_at Float64, body String, version Int64",
            "ReplacingMergeTree(version)",
            "ORDER BY id",
        ),
        *ddl.everywhere(
            "detection",
            "detector String, key String, state String, deleted UInt8, version Int64",
            "ReplacingMergeTree(version)",
            "ORDER BY (detector, key)",
        ),
        *ddl.everywhere(
            "actions",
            "id String, incident_id String, time Float64, kind LowCardinality(String),"
            " who String, address String, text String, until Nullable(Float64)",
            "ReplacingMergeTree",
            f"ORDER BY id {ddl.ttls['actions']}",
        ),
        *ddl.everywhere(
            "deferrals",
            "seq Int64, body String",
            "MergeTree",
            "ORDER BY seq TTL toDateTime(intDiv(seq, 1000000000)) + INTERVAL 1 HOUR",
        ),
        *ddl.everywhere(
            "dashboards",
            "id String, started_at Float64, gone UInt8, version Int64,"
            " beat DateTime64(3) DEFAULT now64(3)",
            "ReplacingMergeTree(version)",
            "ORDER BY id TTL toDateTime(beat) + INTERVAL 1 DAY",
        ),
    ]


def _heard(ddl: Ddl) -> list[str]:
    """By the dashboards' clocks: an engine is silent while ``silent_at`` is the later one."""
    columns = ", ".join(
        f"ADD COLUMN IF NOT EXISTS {name} SimpleAggregateFunction(max, Float64)"
        for name in ("heard_at", "silent_at")
    )
    return [ddl.alter("engines", columns)]


MIGRATIONS: Final[tuple[Callable[[Ddl], list[str]], ...]] = (_first, _heard)
"""Step ``n`` takes the tables from version n to n + 1; every statement may be repeated."""


def migrate(http: Http, target: ClickHouseTarget, limits: RetentionLimits) -> None:
    """Create what is missing; raises :class:`StoreError` for tables of a newer kvlens.

    Dashboards that start together repeat each other's statements, which changes nothing.
    """
    ddl = Ddl(target, limits)
    if not http.query(f"SELECT 1 FROM system.databases WHERE name = '{ddl.database}'"):
        http.command(ddl.create_database())
    for statement in ddl.everywhere(
        "meta",
        "name String, value String, version Int64",
        "ReplacingMergeTree(version)",
        "ORDER BY name",
    ):
        http.command(statement)
    meta = dict(http.query(f"SELECT name, value FROM {ddl.database}.meta FINAL"))
    version = int(meta.get("schema", "0"))
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{target} has schema {version}, written by a newer kvlens; this one knows up to "
            f"{len(MIGRATIONS)}: upgrade kvlens or name another database"
        )
    for number, step in enumerate(MIGRATIONS[version:], start=version + 1):
        for statement in step(ddl):
            http.command(statement)
        _remember(http, ddl, "schema", str(number))
    ages = f"{limits.request_age} {limits.rollup_age}"
    if version and meta.get("ages") != ages:
        for table in ddl.ttls:
            http.command(ddl.ttl(table, is_sharded=table in ("requests", "sums")))
    if meta.get("ages") != ages:
        _remember(http, ddl, "ages", ages)


def _remember(http: Http, ddl: Ddl, name: str, value: str) -> None:
    row = {"name": name, "value": value, "version": time.time_ns()}
    http.insert(f"{ddl.database}.meta", [row])
