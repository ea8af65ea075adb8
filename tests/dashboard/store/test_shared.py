"""Two whole dashboards on one ClickHouse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import exports
import factory
import httpx
import pytest
from receiver import Receiver, receiving
from waiting import eventually

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import load_settings
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget

INFO = factory.engine()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@contextmanager
def dashboard(target: ClickHouseTarget, receiver: Receiver) -> Iterator[httpx.Client]:
    login = f"{target.user}:{quote(target.password, safe='')}@"
    settings = load_settings(
        store=str(target).replace("://", f"://{login}"),
        port=0,
        webhook_urls=receiver.url,
        webhook_secret="a secret of some length",
    )
    with running(settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def send(client: httpx.Client, *records: Any) -> None:
    body = exports.as_json(exports.records_export(INFO, records))
    headers = {"Content-Type": "application/json"}
    client.post("/v1/traces", content=body, headers=headers).raise_for_status()


def incidents(client: httpx.Client) -> Any:
    return client.get("/api/v1/incidents").json()["incidents"]


def test_two_dashboards_are_one(target: ClickHouseTarget, receiver: Receiver) -> None:
    with dashboard(target, receiver) as first, dashboard(target, receiver) as second:
        eventually(lambda: first.get("/readyz").is_success)
        send(first, factory.lost_record(0, INFO))
        send(second, factory.lost_record(1, INFO), factory.lost_record(1, INFO))
        send(first, factory.lost_record(1, INFO), factory.lost_record(2, INFO))
        (opened,) = eventually(lambda: incidents(second))
        assert (opened["kind"], opened["requests"]) == ("zero_hit", 3)
        for client in (first, second):
            assert len(client.get("/api/v1/requests").json()["requests"]) == 3
            assert client.get(f"/incidents/{opened['id']}").is_success
            (engine,) = client.get("/api/v1/engines").json()["engines"]
            assert engine["totals"]["requests"] == {"lost": 3}
        path = f"/api/v1/incidents/{opened['id']}/acknowledge"
        second.post(path, json={"name": "ana"}).raise_for_status()
        eventually(lambda: incidents(first)[0]["handling"]["acknowledged_by"] == "ana")
        receiver.wait_for(2)
    # One of them notified, once.
    assert receiver.types() == ["incident.opened", "incident.acknowledged"]
    with dashboard(target, receiver) as third:
        eventually(lambda: third.get("/readyz").is_success)
        send(third, *(factory.served_record(n, INFO) for n in range(3, 13)))
        eventually(lambda: incidents(third)[0]["state"] == "closed")
        receiver.wait_for(3)
    assert receiver.types()[2:] == ["incident.closed"]
