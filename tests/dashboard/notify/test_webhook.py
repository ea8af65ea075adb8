from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import time
from collections.abc import Iterator

import httpx
import pytest
from noticing import WORDING, incident
from receiver import Receiver, receiving
from waiting import eventually

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.notify import webhook
from kvlens.dashboard.notify.webhook import Message, Webhook, message, sign
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.view.wording import Notice

SECRET = "a secret of some length"


class Bench:
    def __init__(self, url: str, capacity: int = 10) -> None:
        self.metrics = SelfMetrics()
        client = httpx.Client(timeout=5)
        self.hook = Webhook(f"{url}/hook", client, self.metrics.webhooks, SECRET, capacity)

    def put(self, *events: str) -> None:
        for event in events:
            self.hook.put(message(event, Notice(incident(), Handling()), WORDING, time.time()))

    def count(self, outcome: str) -> float | None:
        labels = {"target": "webhook", "outcome": outcome}
        return self.metrics.registry.get_sample_value(
            "kvlens_dashboard_notifications_total", labels
        )


@pytest.fixture
def bench(receiver: Receiver) -> Iterator[Bench]:
    made = Bench(receiver.url)
    made.hook.start()
    yield made
    receiver.gate.set()
    made.hook.end()
    made.hook.join(10)


def test_a_message_is_signed_and_complete(bench: Bench, receiver: Receiver) -> None:
    bench.put("incident.opened")
    got = receiver.wait_for(1)[0]
    assert got.path == "/hook"
    ident, timestamp = got.headers["webhook-id"], got.headers["webhook-timestamp"]
    assert abs(int(timestamp) - time.time()) < 60
    signed = b".".join([ident.encode(), timestamp.encode(), got.body])
    digest = hmac.new(SECRET.encode(), signed, hashlib.sha256).digest()
    assert got.headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    assert got.json["type"] == "incident.opened"
    data = got.json["data"]
    assert data["incident"]["id"] == "zero_hit-1"
    assert data["incident"]["handling"]["acknowledged_by"] is None
    assert data["dashboard_url"] == "https://kv.example/incidents/zero_hit-1"
    assert data["annotations"]["summary"] == "zero_hit on node-a:0"
    eventually(lambda: bench.count("sent") == 1)


def test_the_published_example_of_standard_webhooks() -> None:
    body = b'{"test": 2432232314}'
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == expected
    assert sign("whsec_!", "x", 1, b"") != sign("!", "x", 1, b"")  # text that only looks like it


@pytest.mark.parametrize("status", [429, 500, 503])
def test_tried_again_with_the_same_id_in_order(
    bench: Bench, receiver: Receiver, status: int
) -> None:
    receiver.answers = [status, status]
    bench.put("incident.opened", "incident.closed")
    got = receiver.wait_for(4)
    assert receiver.types() == ["incident.opened"] * 3 + ["incident.closed"]
    assert len({item.headers["webhook-id"] for item in got}) == 2
    assert len({item.body for item in got[:3]}) == 1
    eventually(lambda: bench.count("sent") == 2)
    assert (bench.count("retried"), bench.count("failed")) == (2, 0)


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_is_final_and_counted(bench: Bench, receiver: Receiver, status: int) -> None:
    receiver.answers = [status]
    bench.put("incident.opened", "incident.closed")
    receiver.wait_for(2)
    assert receiver.types() == ["incident.opened", "incident.closed"]
    eventually(lambda: bench.count("sent") == 1)
    assert bench.count("failed") == 1


def test_a_receiver_that_is_down_gets_it_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with receiving() as gone:
        port = int(gone.url.rpartition(":")[2])
    bench = Bench(f"http://127.0.0.1:{port}")
    bench.hook.start()
    with caplog.at_level(logging.INFO, logger="kvlens.dashboard.notify.sender"):
        bench.put("incident.opened")
        eventually(lambda: (bench.count("retried") or 0) >= 3)
        with receiving(port) as back:
            back.wait_for(1)
            eventually(lambda: "accepted again" in caplog.text)
            bench.hook.end()
            bench.hook.join(10)
    assert caplog.text.count("will try again") == 1  # once per outage
    assert SECRET not in caplog.text


def test_a_full_queue_drops_the_oldest_and_never_blocks(receiver: Receiver) -> None:
    bench = Bench(receiver.url, capacity=2)
    bench.put("a", "b", "c")  # its thread does not run yet
    assert (bench.hook.waiting, bench.count("dropped")) == (2, 1)
    bench.hook.start()
    receiver.wait_for(2)
    assert receiver.types() == ["b", "c"]
    bench.hook.end()
    bench.hook.join(10)


def test_what_waits_at_the_end_gets_one_more_try(receiver: Receiver) -> None:
    bench = Bench(receiver.url)
    bench.hook.end()
    bench.put("incident.opened")
    bench.hook.start()
    bench.hook.join(10)
    assert receiver.types() == ["incident.opened"]


def test_old_messages_are_given_up(bench: Bench, receiver: Receiver) -> None:
    old = time.time() - webhook._LONGEST_WAIT - 1
    bench.hook.put(Message("msg_old", b"{}", old))
    bench.put("incident.opened")
    receiver.wait_for(1)
    assert receiver.types() == ["incident.opened"]
    assert bench.count("failed") == 1


def test_the_receivers_wish_for_a_pause_is_kept(bench: Bench, receiver: Receiver) -> None:
    """A wish that outlasts the test: there is no second attempt."""
    receiver.answers, receiver.headers = [503], {"Retry-After": "3600"}
    bench.put("incident.opened")
    eventually(lambda: bench.count("retried") == 1)
    bench.put("incident.closed")
    assert len(receiver.got) == 1
    assert bench.hook.waiting == 2
