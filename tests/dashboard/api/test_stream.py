"""The event stream of a real server, read as a browser reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import exports
import factory
import httpx
import pytest

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings

INFO = factory.engine()
Message = dict[str, Any]


def messages(response: httpx.Response) -> Iterator[Message]:
    message: Message = {}
    for line in response.iter_lines():
        if line:
            field, _, value = line.partition(": ")
            message[field or "comment"] = value
        elif message:
            yield message
            message = {}


def until(stream: Iterator[Message], event: str) -> Message:
    message = next(message for message in stream if message.get("event") == event)
    return {**message, "data": json.loads(message["data"])}


def ready(stream: Iterator[Message]) -> list[Message]:
    """Everything that is replayed on connect."""
    replayed = []
    for message in stream:
        if "comment" in message:
            assert message["retry"] == "2000"
            return replayed
        replayed.append({**message, "data": json.loads(message["data"])})
    raise AssertionError("the stream ended")


def send(client: httpx.Client, *records: Any) -> None:
    body = exports.as_json(exports.records_export(INFO, records))
    headers = {"Content-Type": "application/json"}
    client.post("/v1/traces", content=body, headers=headers).raise_for_status()


def test_requests_engines_and_incidents_arrive(client: httpx.Client) -> None:
    with client.stream("GET", "/api/v1/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = messages(response)
        assert ready(stream) == []
        send(client, factory.lost_record(0, INFO))
        first, second = next(stream), next(stream)
        assert {first["event"], second["event"]} == {"request", "engine"}
        assert {json.loads(m["data"])["incarnation_id"] for m in (first, second)} == {"inc-a1"}
        assert int(first["id"]) <= int(second["id"]) <= time.time() * 1000
        send(client, factory.lost_record(1, INFO), factory.lost_record(2, INFO))
        assert until(stream, "incident")["data"]["state"] == "open"


def test_the_third_lost_request_is_on_the_stream_within_two_seconds(client: httpx.Client) -> None:
    """Measured by the records' own times: the third finishes as it is sent."""
    with client.stream("GET", "/api/v1/stream") as response:
        stream = messages(response)
        ready(stream)
        for index in range(3):
            send(client, factory.lost_record(index, INFO, finish=time.time()))
        incident = until(stream, "incident")["data"]
        seen = time.time()
    assert incident["state"] == "open"
    assert 0 <= seen - incident["opened_at"] < 2.0


def test_open_incidents_are_replayed_and_survive_a_restart(settings: Settings) -> None:
    with running(settings) as url, httpx.Client(base_url=url) as client:
        send(client, *(factory.lost_record(n, INFO) for n in range(3)))
        with client.stream("GET", "/api/v1/stream") as response:
            first = until(messages(response), "incident")["data"]
    with running(settings) as url, httpx.Client(base_url=url) as client:
        with client.stream("GET", "/api/v1/stream") as response:
            stream = messages(response)
            assert [message["data"] for message in ready(stream)] == [first]
            send(client, factory.lost_record(3, INFO))
            grown = until(stream, "incident")["data"]
        assert (grown["id"], grown["requests"]) == (first["id"], 4)


def test_a_reconnect_hears_of_what_closed_meanwhile(client: httpx.Client) -> None:
    with client.stream("GET", "/api/v1/stream") as response:
        stream = messages(response)
        ready(stream)
        send(client, *(factory.lost_record(n, INFO) for n in range(3)))
        last = until(stream, "incident")["id"]
    send(client, *(factory.served_record(n, INFO) for n in range(3, 13)))
    send(client, factory.served_record(13, INFO))
    with client.stream("GET", "/api/v1/stream") as response:
        assert ready(messages(response)) == []
    with client.stream("GET", "/api/v1/stream", headers={"Last-Event-ID": last}) as response:
        replayed = ready(messages(response))
    assert [message["data"]["state"] for message in replayed] == ["closed"]


@pytest.mark.parametrize("last", ["x", "-1", "9" * 40])
def test_a_foreign_last_event_id_is_as_good_as_none(client: httpx.Client, last: str) -> None:
    with client.stream("GET", "/api/v1/stream", headers={"Last-Event-ID": last}) as response:
        assert response.status_code == 200
        assert ready(messages(response)) == []


def test_open_streams_do_not_hold_up_the_end(settings: Settings) -> None:
    with httpx.Client(timeout=10) as client:
        with running(settings) as url:
            request = client.build_request("GET", f"{url}/api/v1/stream")
            stream = messages(client.send(request, stream=True))
            ready(stream)
        assert list(stream) == []  # ended by the server, not cut off
