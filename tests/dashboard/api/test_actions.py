"""Acknowledge, silence, annotate: over HTTP, with the stream and the audit log."""

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
from kvlens.dashboard.settings import Settings, load_settings

INFO = factory.engine()
TOKEN = "read-token-0123456789"
INGEST = "ingest-token-0123456789"


def send(client: httpx.Client, *records: Any, token: str = "") -> None:
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    body = exports.as_json(exports.records_export(INFO, records))
    client.post("/v1/traces", content=body, headers=headers, auth=None).raise_for_status()


def open_incident(client: httpx.Client, token: str = "") -> str:
    send(client, *(factory.lost_record(n, INFO) for n in range(3)), token=token)
    while not (found := client.get("/api/v1/incidents").json()["incidents"]):
        send(client, factory.lost_record(0, INFO), token=token)  # a repeat: waits for detection
    return str(found[0]["id"])


@pytest.fixture
def incident(client: httpx.Client) -> str:
    return f"/api/v1/incidents/{open_incident(client)}"


def test_acknowledge_and_take_it_back(client: httpx.Client, incident: str) -> None:
    before = client.get(incident).json()
    assert before["handling"]["acknowledged_at"] is None
    answer = client.post(f"{incident}/acknowledge", json={"name": " ana ", "text": "on it"})
    assert answer.status_code == 200
    handling = answer.json()["handling"]
    assert handling["acknowledged_by"] == "ana"
    assert abs(handling["acknowledged_at"] - time.time()) < 60
    assert [note["text"] for note in handling["annotations"]] == ["on it"]
    assert client.get(incident).json() == {**before, "handling": handling}
    listed = client.get("/api/v1/incidents").json()["incidents"]
    assert [item["handling"] for item in listed] == [handling]
    back = client.post(f"{incident}/acknowledge", json={"acknowledged": False}).json()
    assert back["handling"]["acknowledged_by"] is None
    plain = client.post(f"{incident}/acknowledge").json()
    assert plain["handling"]["acknowledged_by"] == "somebody on this machine"


def test_silence_and_annotate(client: httpx.Client, incident: str) -> None:
    silent = client.post(f"{incident}/silence", json={"seconds": 3600, "name": "ben"}).json()
    assert silent["handling"]["silenced_by"] == "ben"
    assert abs(silent["handling"]["silenced_until"] - time.time() - 3600) < 60
    loud = client.post(f"{incident}/silence", json={"seconds": 0}).json()
    assert loud["handling"]["silenced_until"] is None
    text = "<b>rolled back</b>"
    noted = client.post(f"{incident}/annotate", json={"text": text}).json()
    assert [note["text"] for note in noted["handling"]["annotations"]] == [text]


def test_actions_arrive_on_the_stream(client: httpx.Client, incident: str) -> None:
    def states(response: httpx.Response) -> Iterator[Any]:
        for line in response.iter_lines():
            if line.startswith("data: ") and '"handling"' in line:
                yield json.loads(line[6:])

    with client.stream("GET", "/api/v1/stream") as response:
        stream = states(response)
        assert next(stream)["handling"]["acknowledged_by"] is None
        client.post(f"{incident}/acknowledge", json={"name": "ana"}).raise_for_status()
        assert next(stream)["handling"]["acknowledged_by"] == "ana"
    with client.stream("GET", "/api/v1/stream") as response:
        assert next(states(response))["handling"]["acknowledged_by"] == "ana"


def test_a_closed_incident_can_be_annotated_but_not_silenced(
    client: httpx.Client, incident: str
) -> None:
    send(client, *(factory.served_record(n, INFO) for n in range(3, 13)))
    send(client, factory.served_record(3, INFO))
    assert client.get(incident).json()["state"] == "closed"
    noted = client.post(f"{incident}/annotate", json={"text": "post mortem"})
    assert noted.json()["handling"]["annotations"][0]["text"] == "post mortem"
    refused = client.post(f"{incident}/silence", json={"seconds": 60})
    assert refused.status_code == 409
    assert "is closed: there is nothing to silence" in refused.text


def test_the_audit_log_is_paged_newest_first(client: httpx.Client, incident: str) -> None:
    for text in "abc":
        client.post(f"{incident}/annotate", json={"text": text, "name": text}).raise_for_status()
    first = client.get("/api/v1/audit", params={"limit": 2}).json()
    assert [action["text"] for action in first["actions"]] == ["c", "b"]
    entry = first["actions"][0]
    assert (entry["who"], entry["kind"], entry["address"]) == ("c", "annotate", "127.0.0.1")
    assert incident.endswith(entry["incident_id"])
    rest = client.get("/api/v1/audit", params={"before": repr(first["next_before"])}).json()
    assert [action["text"] for action in rest["actions"]] == ["a"]
    assert rest["next_before"] is None


@pytest.mark.parametrize(
    ("action", "body", "told"),
    [
        ("silence", {}, "seconds"),
        ("silence", {"seconds": -1}, "seconds"),
        ("silence", {"seconds": 10**9}, "seconds"),
        ("annotate", {"text": "  "}, "text"),
        ("annotate", {"text": "x" * 2001}, "text"),
        ("annotate", {"text": "x", "who": "ana"}, "who: there is no such parameter"),
        ("acknowledge", {"name": "n" * 129}, "name"),
        ("acknowledge", [1], "acknowledge"),
    ],
)
def test_wrong_bodies_are_explained(
    client: httpx.Client, incident: str, action: str, body: Any, told: str
) -> None:
    answer = client.post(f"{incident}/{action}", json=body)
    assert answer.status_code == 422
    assert told in answer.text or isinstance(body, list)
    assert client.get("/api/v1/audit").json()["actions"] == []


def test_an_unknown_incident(client: httpx.Client) -> None:
    answer = client.post("/api/v1/incidents/nope/acknowledge", json={})
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no incident 'nope'")


def test_acting_needs_the_read_token_and_logs_the_user_name(settings: Settings) -> None:
    guarded = load_settings(store=settings.store, port=0, read_token=TOKEN, ingest_token=INGEST)
    with running(guarded) as url, httpx.Client(base_url=url, timeout=10) as client:
        client.auth = ("carol", TOKEN)
        path = f"/api/v1/incidents/{open_incident(client, INGEST)}/acknowledge"
        for auth in (None, ("carol", INGEST)):
            assert httpx.post(url + path, json={}, auth=auth).status_code == 401
        assert client.post(path, json={}).json()["handling"]["acknowledged_by"] == "carol"
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(url + path, json={}, headers=bearer).json()
        assert answer["handling"]["acknowledged_by"] == "holder of the read token"


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_other_sites_cannot_act_through_a_browser(
    client: httpx.Client, incident: str, headers: dict[str, str]
) -> None:
    answer = client.post(f"{incident}/acknowledge", json={}, headers=headers)
    assert answer.status_code == 403
    assert client.get(incident).json()["handling"]["acknowledged_at"] is None


def test_the_dashboards_own_page_may_act(client: httpx.Client, incident: str) -> None:
    origin = str(client.base_url).rstrip("/")
    own = {"Origin": origin, "Sec-Fetch-Site": "same-origin"}
    assert client.post(f"{incident}/acknowledge", json={}, headers=own).status_code == 200
    form = client.post(f"{incident}/annotate", data={"text": "x"}, headers=own)
    assert form.status_code == 422  # JSON only: what a foreign form can send is not taken


def test_large_and_endless_bodies_are_refused(client: httpx.Client, incident: str) -> None:
    assert client.post(f"{incident}/annotate", content=b" " * 65_537).status_code == 413
    assert client.post(f"{incident}/annotate", content=iter([b"{}"])).status_code == 411
