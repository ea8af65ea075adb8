"""What only ClickHouse promises: its tables, deduplication, retention, sharing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import factory
import msgspec
import pytest
from noticing import incident

from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store import clickhouse_lease, clickhouse_schema
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.clickhouse import ClickHouseStore
from kvlens.dashboard.store.clickhouse_http import Http
from kvlens.dashboard.store.clickhouse_query import row_id
from kvlens.dashboard.store.clickhouse_schema import Ddl
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget
from kvlens.dashboard.store.codec import pack
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.telemetry.records import RequestRecord, encode

A = factory.engine()
DAY = 86_400.0
LIMITS = RetentionLimits(30 * DAY, 365 * DAY, 20 << 30)


def batch(*records: RequestRecord) -> Batch:
    return Batch([(A, A.started_at)], [], [RecordRow(r, pack(encode(r))) for r in records])


@pytest.fixture
def http(target: ClickHouseTarget) -> Iterator[Http]:
    client = Http(target)
    yield client
    client.close()


def statements(cluster: str | None) -> list[str]:
    ddl = Ddl(ClickHouseTarget("http://ch:8123", "kv", cluster=cluster), LIMITS)
    return [statement for step in clickhouse_schema.MIGRATIONS for statement in step(ddl)]


def test_a_cluster_has_sharded_and_replicated_tables() -> None:
    alone, spread = statements(None), statements("prod")
    assert not any("Replicated" in text or "CLUSTER" in text for text in alone)
    assert all(" ON CLUSTER 'prod' " in text for text in spread)
    tables = {text.split()[5]: text for text in spread if text.startswith("CREATE TABLE")}
    for name in ("requests", "sums"):
        assert "Distributed('prod', 'kv', " in tables[f"kv.{name}"]
        assert (
            f"/clickhouse/tables/{{shard}}/kv/{name}', '{{replica}}'" in tables[f"kv.{name}_local"]
        )
    assert "ReplicatedReplacingMergeTree(" in tables["kv.requests_local"]
    assert "ReplicatedAggregatingMergeTree(" in tables["kv.sums_local"]
    for name in ("engines", "incidents", "detection", "actions", "deferrals", "dashboards"):
        path = f"('/clickhouse/tables/all/kv/{name}', '{{shard}}-{{replica}}'"
        assert f"MergeTree{path}" in tables[f"kv.{name}"]
        assert "Replicated" in tables[f"kv.{name}"]
    view = next(text for text in spread if "MATERIALIZED VIEW" in text)
    assert " TO kv.sums_local " in view
    assert "FROM kv.requests_local" in view


REPLICATED = """
import os, sys
from pathlib import Path
from clickhouse_server import Engine
engine = Engine(Path(sys.argv[1]))
engine.run("CREATE DATABASE kv")
for statement in sys.stdin.read().split("\\0"):
    engine.run(statement)
print(engine.run("SELECT engine FROM system.tables WHERE database = 'kv'").decode(), flush=True)
os._exit(0)  # Keeper's stand-in has no end
"""


def test_the_engine_accepts_the_replicated_tables(tmp_path: Path) -> None:
    """All that a process without Keeper can check: they are created, nothing is inserted."""
    if importlib.util.find_spec("chdb") is None:
        pytest.skip("no chdb")
    made = "\0".join(
        text.replace(" ON CLUSTER 'main'", "")
        for text in statements("main")
        if not text.startswith("ALTER")  # waits for Keeper; the cluster fixture runs it
    )
    run = subprocess.run(
        [sys.executable, "-c", REPLICATED, str(tmp_path)],
        input=made,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == {
        "ReplicatedReplacingMergeTree",
        "ReplicatedAggregatingMergeTree",
        "ReplicatedMergeTree",
        "Distributed",
        "MaterializedView",
    }


def test_an_insert_that_is_repeated_changes_nothing(target: ClickHouseTarget, http: Http) -> None:
    """As after a lost answer: the same rows under the same token."""
    with closing(ClickHouseStore(target, LIMITS)) as store:
        record = factory.lost_record(1, A)
        store.append([batch(record)])
        # As if the check before the insert had not seen the row yet.
        store._appender._there = lambda rows: set()  # type: ignore[method-assign]
        store.append([batch(record)])
        assert http.query(f"SELECT count() FROM {target.database}.requests") == [[1]]
        assert store.engines()[0].totals.requests == {"lost": 1}
        hours = store.series(factory.START, factory.START + 3600, 3600, None)
        assert [point.requests for point in hours] == [{"lost": 1}]


def test_two_copies_of_a_row_are_one_request(target: ClickHouseTarget, http: Http) -> None:
    """As after two dashboards took the same request at the same moment, in other batches."""
    with closing(ClickHouseStore(target, LIMITS)) as store:
        records = [factory.lost_record(n, A, finish=factory.START) for n in range(5)]
        store._appender._there = lambda rows: set()  # type: ignore[method-assign]
        store.append([batch(*records[:3])])
        store.append([batch(*records)])
        assert http.query(f"SELECT count() FROM {target.database}.requests") == [[8]]
        first = store.requests(RequestQuery(limit=3))
        assert first.next_cursor is not None
        second = store.requests(RequestQuery(limit=3, cursor=first.next_cursor))
        names = [record.request_id for record in [*first.records, *second.records]]
        assert sorted(names) == [f"cmpl-{n:04d}" for n in range(5)]
        assert second.next_cursor is None
        assert len(store.records_after(0, 100)) == 5


def test_requests_are_known_by_engine_and_id() -> None:
    ids = {row_id(inc, ident) for inc in ("a", "b") for ident in ("x", "y", "")}
    assert len(ids) == 6
    assert all(0 <= ident < 2**63 for ident in ids)


def old(record: RequestRecord, age: float) -> RequestRecord:
    return msgspec.structs.replace(record, finish_time=time.time() - age)


def test_old_requests_and_minutes_go_and_hours_stay(target: ClickHouseTarget, http: Http) -> None:
    with closing(ClickHouseStore(target, LIMITS)) as store:
        store.append([batch(old(factory.lost_record(1, A), 40 * DAY), factory.lost_record(2, A))])
        _merge(http, target)
        since = time.time() - 50 * DAY
        assert [r.request_id for r in store.requests(RequestQuery()).records] == ["cmpl-0002"]
        assert sum(p.requests["lost"] for p in store.series(since, time.time(), 60, None)) == 1
        assert sum(p.requests["lost"] for p in store.series(since, time.time(), 3600, None)) == 2
        assert store.engines()[0].totals.requests == {"lost": 2}


def test_another_retention_holds_from_the_next_start(target: ClickHouseTarget, http: Http) -> None:
    with closing(ClickHouseStore(target, LIMITS)) as store:
        store.append([batch(old(factory.lost_record(1, A), 10 * DAY), factory.lost_record(2, A))])
    with closing(ClickHouseStore(target, RetentionLimits(5 * DAY, 5 * DAY, 0))) as store:
        _merge(http, target)
        assert [r.request_id for r in store.requests(RequestQuery()).records] == ["cmpl-0002"]
        hours = store.series(time.time() - 50 * DAY, time.time(), 3600, None)
        assert [point.requests for point in hours] == [{"lost": 1}]


def _merge(http: Http, target: ClickHouseTarget) -> None:
    """Apply TTLs now instead of some time."""
    suffix = "_local" if target.cluster else ""
    for table in ("requests", "sums"):
        http.command(
            f"ALTER TABLE {target.database}.{table}{suffix} MATERIALIZE TTL"
            " SETTINGS mutations_sync = 2"
        )
        http.command(f"OPTIMIZE TABLE {target.database}.{table}{suffix} FINAL")


def test_times_far_away_are_kept_as_they_are(target: ClickHouseTarget) -> None:
    with closing(ClickHouseStore(target, LIMITS)) as store:
        far = msgspec.structs.replace(factory.lost_record(1, A), finish_time=9e10)
        store.append([batch(far)])
        assert store.request("cmpl-0001") == far


def test_tables_of_a_newer_kvlens_are_refused(
    target: ClickHouseTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClickHouseStore(target, LIMITS).close()
    monkeypatch.setattr(clickhouse_schema, "MIGRATIONS", ())
    with pytest.raises(StoreError, match="written by a newer kvlens"):
        ClickHouseStore(target, LIMITS)


def test_each_migration_is_applied_once(
    target: ClickHouseTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClickHouseStore(target, LIMITS).close()

    def later(ddl: Ddl) -> list[str]:
        return ddl.everywhere("later", "x Int32", "MergeTree", "ORDER BY x")

    applied: list[str] = []

    def counted(ddl: Ddl) -> list[str]:
        applied.append(ddl.database)
        return later(ddl)

    first = clickhouse_schema.MIGRATIONS
    monkeypatch.setattr(clickhouse_schema, "MIGRATIONS", (*first, counted))
    for _ in range(2):
        ClickHouseStore(target, LIMITS).close()
    assert applied == [target.database]


def test_old_closed_incidents_are_deleted_by_the_leader(target: ClickHouseTarget) -> None:
    now = time.time()
    closed = {"state": "closed", "closed_at": now - 40 * DAY}
    with closing(ClickHouseStore(target, LIMITS)) as store:
        store.save_detection(1, [incident(id="old")], [])
        store.save_detection(
            2,
            [
                incident(id="old", **closed),
                incident(id="young", **(closed | {"closed_at": now})),
                incident(id="open"),
            ],
            [],
        )
        store.maintain(now)
        assert len(store.incidents()) == 3  # it does not lead yet
        assert store.lead()
        store.maintain(now)
        assert {item.id for item in store.incidents()} == {"young", "open"}


def test_one_dashboard_leads_and_another_follows_it(
    target: ClickHouseTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clickhouse_lease, "BEAT", 0.0)
    with closing(ClickHouseStore(target, LIMITS)) as second:
        with closing(ClickHouseStore(target, LIMITS)) as first:
            first._lease._started_at -= 1.0
            assert (first.lead(), second.lead(), first.lead()) == (True, False, True)
            assert (first._lease.valid, second._lease.valid) == (True, False)
        assert second.lead()  # the first has left


def test_a_dashboard_that_fell_silent_is_replaced(
    target: ClickHouseTarget, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clickhouse_lease, "BEAT", 0.0)
    silent = {
        "id": "silent",
        "started_at": 1.0,
        "gone": 0,
        "version": 1,
        "beat": time.time() - clickhouse_lease.LEASE - 1,
    }
    with closing(ClickHouseStore(target, LIMITS)) as store:
        http.insert(f"{target.database}.dashboards", [silent])
        assert store.lead()
        http.insert(f"{target.database}.dashboards", [silent | {"beat": time.time(), "version": 2}])
        assert not store.lead()  # its heart beats again, and it is older


def test_what_one_dashboard_stores_the_other_finds(target: ClickHouseTarget) -> None:
    with (
        closing(ClickHouseStore(target, LIMITS)) as one,
        closing(ClickHouseStore(target, LIMITS)) as two,
    ):
        record, waiting = factory.lost_record(1, A), factory.lost_record(2, A)
        one.append([batch(record), Batch([(A, 1.0)], deferrals=[waiting])])
        ((seq, found),) = two.records_at(two.seqs_after(0))
        assert found == record
        assert two.records_at([]) == []
        assert two.seqs_after(seq) == []
        assert [report for _, report in two.deferrals_after(0)] == [waiting]
        assert two.incarnations() == [(A, None)]
        assert two.append([batch(record)]).duplicates == 1
        later = factory.engine(incarnation_id="inc-a2", started_at=factory.START + 100)
        ended = two.append([Batch([(later, later.started_at)])]).ended
        assert ended == [("inc-a1", factory.START + 100)]
