"""Against the real Alertmanager, which delivers to a real receiver."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import exports
import factory
import httpx
import pytest
from noticing import WORDING, incident
from receiver import Receiver, receiving
from waiting import eventually

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.notify.alertmanager import Alertmanager
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.view.wording import Notice

INFO = factory.engine()
PROGRAM = shutil.which(os.environ.get("KVLENS_TEST_ALERTMANAGER", "prometheus-alertmanager"))
real = pytest.mark.skipif(PROGRAM is None, reason="no prometheus-alertmanager: apt-get install it")


@contextmanager
def alertmanager(folder: Path, receiver: str, port: int) -> Iterator[str]:
    """Run the real one; it groups by alert name and engine and delivers to ``receiver``."""
    config = folder / "alertmanager.yml"
    route = {
        "receiver": "test",
        "group_by": ["alertname", "engine"],
        "group_wait": "50ms",
        "group_interval": "100ms",
        "repeat_interval": "1h",
    }
    receivers = [{"name": "test", "webhook_configs": [{"url": f"{receiver}/page"}]}]
    config.write_text(json.dumps({"route": route, "receivers": receivers}))  # JSON is YAML
    command = [
        str(PROGRAM),
        f"--config.file={config}",
        f"--storage.path={folder / 'am'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: _ready(url))
            yield url
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        store=str(tmp_path / "kvlens.db"),
        port=0,
        public_url="https://kv.example",
        alertmanager_urls=(f"http://127.0.0.1:{free_port()}",),
        alertmanager_resend_seconds=1,
        runbook_url_template="https://wiki.example/{kind}",
    )


def port_of(settings: Settings) -> int:
    return int(settings.alertmanager_urls[0].rpartition(":")[2])


def send(client: httpx.Client, *records: Any) -> None:
    body = exports.as_json(exports.records_export(INFO, records))
    headers = {"Content-Type": "application/json"}
    client.post("/v1/traces", content=body, headers=headers).raise_for_status()


def lose(client: httpx.Client, first: int = 0) -> None:
    send(client, *(factory.lost_record(n, INFO) for n in range(first, first + 3)))


def alerts(settings: Settings) -> list[Any]:
    found: list[Any] = httpx.get(f"{settings.alertmanager_urls[0]}/api/v2/alerts").json()
    return found


def statuses(receiver: Receiver) -> list[str]:
    return [got.json["status"] for got in receiver.got]


@real
def test_an_incident_is_an_alert_until_it_closes(
    settings: Settings, receiver: Receiver, tmp_path: Path
) -> None:
    with (
        alertmanager(tmp_path, receiver.url, port_of(settings)),
        running(settings) as url,
        httpx.Client(base_url=url, timeout=10) as client,
    ):
        lose(client)
        page = receiver.wait_for(1)[0].json
        assert page["status"] == "firing"
        assert page["groupLabels"] == {"alertname": "KVLensZeroHit", "engine": "node-a:0"}
        (alert,) = page["alerts"]
        (opened,) = client.get("/api/v1/incidents").json()["incidents"]
        assert alert["labels"] == {
            "alertname": "KVLensZeroHit",
            "severity": "critical",
            "engine": "node-a:0",
            "model_name": factory.MODEL,
            "cause": "drafter_fallback",
            "incident_kind": "zero_hit",
            "incident": opened["id"],
        }
        link = f"https://kv.example/incidents/{opened['id']}"
        assert alert["generatorURL"] == alert["annotations"]["dashboard_url"] == link
        assert alert["annotations"]["runbook_url"] == "https://wiki.example/zero_hit"
        assert "tokens that offloading should have served" in alert["annotations"]["description"]

        (first,) = alerts(settings)
        eventually(lambda: alerts(settings)[0]["endsAt"] > first["endsAt"])  # it is sent again

        send(client, *(factory.served_record(n, INFO) for n in range(3, 13)))
        eventually(lambda: "resolved" in statuses(receiver))
        assert statuses(receiver) == ["firing", "resolved"]
        assert receiver.got[-1].json["alerts"][0]["endsAt"] > alert["startsAt"]


@real
def test_silence_and_acknowledgement_reach_it(
    settings: Settings, receiver: Receiver, tmp_path: Path
) -> None:
    with (
        alertmanager(tmp_path, receiver.url, port_of(settings)) as upstream,
        running(settings) as url,
        httpx.Client(base_url=url, timeout=10) as client,
    ):

        def act(what: str, **body: Any) -> None:
            answer = client.post(f"/api/v1/incidents/{opened['id']}/{what}", json=body)
            answer.raise_for_status()

        def state() -> str:
            return str(alerts(settings)[0]["status"]["state"])

        def silences() -> list[tuple[str, str]]:
            found = httpx.get(f"{upstream}/api/v2/silences").json()
            return sorted((item["status"]["state"], item["createdBy"]) for item in found)

        lose(client)
        receiver.wait_for(1)
        (opened,) = client.get("/api/v1/incidents").json()["incidents"]
        act("silence", seconds=3600, name="ana")
        eventually(lambda: state() == "suppressed")
        act("silence", seconds=7200, name="ben")
        eventually(lambda: silences() == [("active", "ben"), ("expired", "ana")])
        act("silence", seconds=0)
        eventually(lambda: state() == "active")
        assert {status for status, _ in silences()} == {"expired"}
        act("acknowledge", name="carol")
        eventually(lambda: alerts(settings)[0]["annotations"].get("acknowledged_by") == "carol")


@real
def test_an_outage_loses_nothing_and_a_restart_keeps_the_alert(
    settings: Settings, receiver: Receiver, tmp_path: Path
) -> None:
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as client:
        lose(client)  # nobody listens there yet: ingest goes on
        eventually(lambda: client.get("/api/v1/incidents").json()["incidents"])
        lose(client, first=3)
        with alertmanager(tmp_path, receiver.url, port_of(settings)):
            receiver.wait_for(1)
    with (
        alertmanager(tmp_path, receiver.url, port_of(settings)),
        running(settings) as url,
        httpx.Client(base_url=url, timeout=10) as client,
    ):
        (alert,) = eventually(lambda: alerts(settings))  # sent again by the new process
        assert alert["labels"]["incident_kind"] == "zero_hit"
        send(client, *(factory.served_record(n, INFO) for n in range(6, 16)))
        eventually(lambda: "resolved" in statuses(receiver))


class Bench:
    """One sender, driven by hand."""

    def __init__(self, url: str, capacity: int = 10) -> None:
        self.metrics = SelfMetrics()
        self.sender = Alertmanager(
            url, httpx.Client(timeout=5), self.metrics.alertmanagers, WORDING, 60.0, capacity
        )

    def tell(self, **fields: object) -> None:
        self.sender.tell(Notice(incident(**fields), Handling()))

    def count(self, outcome: str) -> float | None:
        labels = {"target": "alertmanager", "outcome": outcome}
        return self.metrics.registry.get_sample_value(
            "kvlens_dashboard_notifications_total", labels
        )


def test_labels_stay_though_the_cause_changes(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    bench.tell(cause=None)
    bench.sender.work()
    bench.tell(cause="capacity", severity="warning")
    bench.sender.work()
    first, second = (got.json[0] for got in receiver.got)
    assert first["labels"] == second["labels"]
    assert first["startsAt"] == second["startsAt"]


def test_closed_ones_are_sent_once_and_open_ones_each_time(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    bench.tell(id="a")
    bench.tell(id="b", state="closed", closed_at=2.0**40)
    bench.sender.work()
    bench.sender.work()
    sent = [[alert["labels"]["incident"] for alert in got.json] for got in receiver.got]
    assert sent == [["a", "b"], ["a"]]
    closed = receiver.got[0].json[1]
    assert closed["startsAt"] <= closed["endsAt"]  # though the engine's clock is far ahead
    assert closed["endsAt"] < receiver.got[0].json[0]["endsAt"]


def test_released_ones_are_neither_repeated_nor_resolved(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    bench.tell(id="a")
    bench.tell(id="b", state="closed", closed_at=1.0)
    bench.sender.release()
    bench.sender.work()
    assert [[alert["labels"]["incident"] for alert in got.json] for got in receiver.got] == [["b"]]


def test_many_go_in_several_requests(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    for number in range(150):
        bench.tell(id=str(number))
    bench.sender.work()
    assert [len(got.json) for got in receiver.got] == [100, 50]
    assert bench.count("sent") == 150


def test_refused_alerts_are_counted_and_not_repeated_for_ever(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    receiver.answers = [400]
    bench.tell(id="a", state="closed", closed_at=1.0)
    bench.sender.work()
    bench.sender.work()
    assert len(receiver.got) == 1
    assert (bench.count("failed"), bench.sender.waiting) == (1, 0)


def test_an_endless_outage_takes_bounded_memory() -> None:
    with receiving() as gone:
        url = gone.url
    bench = Bench(url, capacity=3)
    for number in range(9):
        bench.tell(id=str(number))
        bench.tell(id=str(number), state="closed", closed_at=1.0)
    assert (bench.sender.waiting, bench.count("dropped")) == (3, 6)


def test_the_token_is_sent(receiver: Receiver, tmp_path: Path) -> None:
    settings = Settings(
        store=str(tmp_path / "kvlens.db"),
        port=0,
        alertmanager_urls=(receiver.url,),
        alertmanager_token="am-token",
    )
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as client:
        lose(client)
        got = receiver.wait_for(1)[0]
        assert got.path == "/api/v2/alerts"
        assert got.headers["authorization"] == "Bearer am-token"
        assert got.headers["user-agent"].startswith("kvlens/")
