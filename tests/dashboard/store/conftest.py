"""Stores of both kinds. ClickHouse: chdb if it is installed, or a real one by its address."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from clickhouse_server import Server, serving

from kvlens.dashboard.store.base import Store
from kvlens.dashboard.store.clickhouse import ClickHouseStore
from kvlens.dashboard.store.clickhouse_http import Http
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget, parse
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.dashboard.store.sqlite import SqliteStore

LIMITS = RetentionLimits(30 * 86_400.0, 365 * 86_400.0, 20 << 30)
REAL = os.environ.get("KVLENS_TEST_CLICKHOUSE_URL")
"""``clickhouse://user:password@host:8123/any?cluster=NAME``; databases are made and dropped."""


@pytest.fixture(scope="session")
def clickhouse_server() -> Iterator[Server]:
    if importlib.util.find_spec("chdb") is None:
        pytest.skip("no chdb: pip install chdb (500 MB), or set KVLENS_TEST_CLICKHOUSE_URL")
    with serving() as server:
        yield server


@contextmanager
def database(kind: str, request: pytest.FixtureRequest) -> Iterator[ClickHouseTarget]:
    """A database that does not exist yet, on one server (``clickhouse``) or over a cluster."""
    name = f"kvlens_test_{uuid.uuid4().hex[:12]}"
    clustered = kind == "cluster"
    if REAL is not None:
        given = parse(REAL)
        if (given.cluster is not None) != clustered:
            pytest.skip("the real ClickHouse is of the other kind")
        made = ClickHouseTarget(given.url, name, given.user, given.password, given.cluster)
    else:
        server: Server = request.getfixturevalue("clickhouse_server")
        made = parse(server.url(name, "?cluster=main" if clustered else ""))
    try:
        yield made
    finally:
        http = Http(made)
        on_cluster = f" ON CLUSTER '{made.cluster}'" if made.cluster and REAL else ""
        http.command(f"DROP DATABASE IF EXISTS {name}{on_cluster} SYNC")
        http.close()


@pytest.fixture(params=["clickhouse", "cluster"])
def target(request: pytest.FixtureRequest) -> Iterator[ClickHouseTarget]:
    with database(request.param, request) as made:
        yield made


Opener = Callable[[], Store]


@pytest.fixture(params=["sqlite", "clickhouse", "cluster"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again; whoever opens it closes it."""
    if request.param == "sqlite":
        yield lambda: SqliteStore(str(tmp_path / "deep" / "store.db"))
    else:
        with database(request.param, request) as made:
            yield lambda: ClickHouseStore(made, LIMITS)


@pytest.fixture
def store(open_store: Opener) -> Iterator[Store]:
    with closing(open_store()) as opened:
        yield opened
