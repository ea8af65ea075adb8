from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import exports
import factory
import httpx
import msgspec
import pytest
from noticing import incident
from receiver import Receiver
from waiting import eventually

from kvlens.dashboard.model.actions import Handling, Note
from kvlens.dashboard.notify.notifier import Notifier, events
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings, load_settings
from kvlens.dashboard.view.wording import Notice

INFO = factory.engine()
SECRET = "a secret of some length"
NOBODY = Handling()


def notice(handling: Handling = NOBODY, **fields: Any) -> Notice:
    return Notice(incident(**fields), handling)


NOTED = Handling(annotations=(Note(time=1.0, who="ana", text="x"),))
ACKED = Handling(acknowledged_at=1.0, acknowledged_by="ana")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, notice(), ["incident.opened"]),
        (notice(), notice(requests=9, lost_tokens=9999), []),
        (notice(), notice(severity="warning"), ["incident.changed"]),
        (notice(), notice(cause="capacity"), ["incident.changed"]),
        (notice(), notice(state="closed"), ["incident.closed"]),
        (notice(), notice(ACKED), ["incident.acknowledged"]),
        (notice(ACKED), notice(), ["incident.unacknowledged"]),
        (notice(), notice(Handling(silenced_until=9.0)), ["incident.silenced"]),
        (notice(Handling(silenced_until=9.0)), notice(), ["incident.unsilenced"]),
        (notice(), notice(NOTED), ["incident.annotated"]),
        (
            notice(),
            notice(msgspec.structs.replace(ACKED, annotations=NOTED.annotations)),
            ["incident.acknowledged"],  # its note is in the message
        ),
    ],
)
def test_events(before: Notice | None, after: Notice, expected: list[str]) -> None:
    assert events(before, after) == expected


class Bench:
    """A notifier with one webhook; ``done`` is what people did about every incident."""

    def __init__(self, receiver: Receiver) -> None:
        self.done = NOBODY
        self.metrics = SelfMetrics()
        settings = load_settings(webhook_urls=receiver.url, webhook_secret=SECRET)
        self.notifier = Notifier(settings, self._handling, self.metrics)

    def _handling(self, idents: Sequence[str]) -> dict[str, Handling]:
        return dict.fromkeys(idents, self.done)


@pytest.fixture
def bench(receiver: Receiver) -> Iterator[Bench]:
    made = Bench(receiver)
    yield made
    made.notifier.stop()


def test_each_further_request_is_no_message(bench: Bench, receiver: Receiver) -> None:
    bench.notifier.start()
    for requests in range(3, 50):
        bench.notifier.incident(incident(requests=requests))
    bench.notifier.incident(incident(state="closed", closed_at=1.0))
    receiver.wait_for(2)
    assert receiver.types() == ["incident.opened", "incident.closed"]


def test_a_restart_repeats_nothing(bench: Bench, receiver: Receiver) -> None:
    bench.notifier.start()
    bench.notifier.adopt([incident()])
    bench.notifier.incident(incident(requests=4))
    bench.notifier.incident(incident(state="closed", closed_at=1.0))
    receiver.wait_for(1)
    assert receiver.types() == ["incident.closed"]


def test_a_dashboard_that_no_longer_leads_tells_nothing(bench: Bench, receiver: Receiver) -> None:
    bench.notifier.start()
    bench.notifier.incident(incident())
    bench.notifier.release()
    bench.notifier.incident(incident(state="closed", closed_at=1.0))
    bench.notifier.adopt([incident(id="next")])
    bench.notifier.incident(incident(id="next", state="closed", closed_at=1.0))
    receiver.wait_for(2)
    assert receiver.types() == ["incident.opened", "incident.closed"]
    assert receiver.got[1].json["data"]["incident"]["id"] == "next"


def test_what_was_over_before_anybody_was_told_is_not_told(
    bench: Bench, receiver: Receiver
) -> None:
    bench.notifier.start()
    bench.notifier.incident(incident(id="old", state="closed", closed_at=1.0))
    bench.notifier.incident(incident())
    receiver.wait_for(1)
    assert [got.json["data"]["incident"]["id"] for got in receiver.got] == ["zero_hit-1"]


def test_a_silenced_incident_only_tells_that_it_is_and_that_it_closed(
    bench: Bench, receiver: Receiver
) -> None:
    bench.notifier.start()
    bench.notifier.incident(incident())
    bench.done = Handling(silenced_until=2.0**40, silenced_by="ana")
    bench.notifier.incident(incident())
    bench.notifier.incident(incident(severity="warning"))
    bench.notifier.incident(incident(state="closed", closed_at=1.0))
    receiver.wait_for(3)
    assert receiver.types() == ["incident.opened", "incident.silenced", "incident.closed"]


def test_an_error_stays_inside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.notifier.start()

    def fail(_: Sequence[str]) -> dict[str, Handling]:
        raise OSError("disk full")

    monkeypatch.setattr(bench.notifier, "_handling", fail)
    bench.notifier.incident(incident())
    assert bench.metrics.registry.get_sample_value("kvlens_dashboard_errors_total") == 1


def test_a_hung_receiver_does_not_hold_up_ingest(receiver: Receiver, tmp_path: Path) -> None:
    receiver.gate.clear()
    settings = Settings(
        store=str(tmp_path / "kvlens.db"),
        port=0,
        webhook_urls=(receiver.url,),
        webhook_secret=SECRET,
        public_url="https://kv.example",
        notify_timeout_seconds=30,
    )
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as client:

        def send(*records: Any) -> None:
            body = exports.as_json(exports.records_export(INFO, records))
            headers = {"Content-Type": "application/json"}
            client.post("/v1/traces", content=body, headers=headers).raise_for_status()

        def found() -> Any:
            return client.get("/api/v1/incidents").json()["incidents"]

        send(*(factory.lost_record(n, INFO) for n in range(3)))
        (opened,) = eventually(found)
        for number in range(3, 30):
            send(factory.lost_record(number, INFO))
        eventually(lambda: found()[0]["requests"] == 30)
        assert receiver.got == []
        receiver.gate.set()
        got = receiver.wait_for(1)[0].json
        assert got["data"]["dashboard_url"] == f"https://kv.example/incidents/{opened['id']}"
        path = f"/api/v1/incidents/{opened['id']}/acknowledge"
        client.post(path, json={"name": "ana"}).raise_for_status()
        receiver.wait_for(2)
        assert receiver.types() == ["incident.opened", "incident.acknowledged"]
        metrics = client.get("/metrics").text
        assert 'notifications_total{outcome="sent",target="webhook"}' in metrics
        assert SECRET not in metrics
