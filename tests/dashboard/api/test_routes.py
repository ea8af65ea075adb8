from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import exports
import factory
import httpx
import pytest
from waiting import eventually

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store import sqlite
from kvlens.telemetry.records import RequestRecord, decode_record, encode
from kvlens.telemetry.semconv import Verdict

A = factory.engine()
B = factory.engine("node-b:0", "inc-b1", affected=False)
LOST = [factory.lost_record(n, A) for n in range(4)]
SERVED = [factory.served_record(n, B) for n in range(10, 13)]


def send(client: httpx.Client, data: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    client.post("/v1/traces", content=exports.as_json(data), headers=headers).raise_for_status()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One server with the same traffic for all tests here, which only read."""
    store = tmp_path_factory.mktemp("api") / "kvlens.db"
    settings = Settings(store=str(store), port=0)
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as opened:
        send_traffic(opened)
        yield opened


def send_traffic(client: httpx.Client) -> None:
    cold = [factory.cold_record(n, A) for n in range(4, 6)]
    send(client, exports.records_export(A, [*LOST, *cold]))
    send(client, exports.records_export(B, SERVED))
    # Detection follows the acknowledgement: an idempotent export waits for it.
    send(client, exports.records_export(A, LOST[:1]))


def get(client: httpx.Client, path: str, **params: Any) -> Any:
    answer = client.get(f"/api/v1/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(answer: dict[str, Any]) -> list[str]:
    return [request["request_id"] for request in answer["requests"]]


def test_engines(client: httpx.Client) -> None:
    engines = {engine["incarnation_id"]: engine for engine in get(client, "engines")["engines"]}
    a = engines["inc-a1"]
    assert (a["state"], a["open_incidents"], engines["inc-b1"]["open_incidents"]) == (
        "losing",
        1,
        0,
    )
    assert a["layout"]["groups"][1]["window"] == 128
    assert a["last_seen"] == factory.START + 15
    assert a["totals"]["requests"] == {"lost": 4, "cold": 2}
    assert a["totals"]["lost_tokens"] == 4 * 1024
    reload = engines["inc-b1"]["totals"]["reload"]
    assert (reload["count"], reload["mean"]) == (3, pytest.approx(0.04))
    assert 0.025 < reload["p50"] < reload["p99"] <= 0.05
    assert get(client, "engines/inc-a1") == get(client, "engines/node-a:0") == a


def test_an_engine_that_stopped_is_gone(settings: Settings) -> None:
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as client:
        send_traffic(client)
        send(client, exports.export(A, exports.engine_span("stopped", factory.START + 90)))
        send(client, exports.records_export(A, LOST[:1]))
        engine = get(client, "engines/inc-a1")
        assert (engine["state"], engine["end_reason"]) == ("gone", "stopped")
        incidents = get(client, "incidents")["incidents"]
        assert [incident["close_reason"] for incident in incidents] == ["engine_gone"]


def test_an_engine_that_dies_without_a_word_is_gone_after_a_while(settings: Settings) -> None:
    hurried = settings.model_copy(update={"engine_gone_seconds": 1.0})
    with running(hurried) as url, httpx.Client(base_url=url, timeout=10) as client:
        send_traffic(client)
        eventually(lambda: get(client, "engines/inc-a1")["state"] == "gone")
        engine = get(client, "engines/inc-a1")
        assert (engine["end_reason"], engine["last_seen"]) == ("silent", factory.START + 15)
        incidents = get(client, "incidents")["incidents"]
        assert {incident["close_reason"] for incident in incidents} == {"engine_gone"}
        send(client, exports.export(A, exports.engine_span("alive", time.time())))
        alive = get(client, "engines/inc-a1")
        assert (alive["state"], alive["ended_at"]) == ("idle", None)
        assert alive["last_seen"] == factory.START + 15


def test_incidents(client: httpx.Client) -> None:
    (incident,) = get(client, "incidents")["incidents"]
    assert (incident["kind"], incident["state"], incident["cause"]) == (
        "zero_hit",
        "open",
        "drafter_fallback",
    )
    assert get(client, f"incidents/{incident['id']}") == incident
    assert get(client, "incidents", state="open")["incidents"] == [incident]
    assert get(client, "incidents", state="closed")["incidents"] == []
    affected = get(client, "requests", incident=incident["id"])
    assert names(affected) == [f"cmpl-000{n}" for n in (3, 2, 1, 0)]
    later = get(client, "requests", incident=incident["id"], since=factory.START + 12)
    assert names(later) == ["cmpl-0003", "cmpl-0002"]


def test_requests_are_whole_records(client: httpx.Client) -> None:
    answer = get(client, "requests", verdict="lost", limit=1)
    record: RequestRecord = decode_record(json.dumps(answer["requests"][0]))
    assert encode(record) == encode(LOST[3])


def test_filters(client: httpx.Client) -> None:
    assert len(names(get(client, "requests"))) == 9
    assert names(get(client, "requests", engine="inc-b1", limit=1)) == ["cmpl-0012"]
    assert len(names(get(client, "requests", verdict=["lost", "cold"]))) == 6
    assert len(names(get(client, "requests", cause="drafter_fallback"))) == 4
    assert names(get(client, "requests", cause="capacity")) == []
    assert len(names(get(client, "requests", model=factory.MODEL))) == 9
    assert len(names(get(client, "requests", min_lost_tokens=1))) == 4
    assert len(names(get(client, "requests", until="2020-01-01T00:00:00Z"))) == 0


def test_pages(client: httpx.Client) -> None:
    first = get(client, "requests", limit=5)
    second = get(client, "requests", limit=5, cursor=first["next_cursor"])
    assert len(names(first)) == 5
    assert second["next_cursor"] is None
    assert sorted(names(first) + names(second)) == sorted(names(get(client, "requests")))


def test_one_request(client: httpx.Client) -> None:
    answer = get(client, "requests/cmpl-0001")
    assert answer["request"]["verdict"] == "lost"
    assert [group["drafter_used"] for group in answer["layout"]["groups"]] == [True] * 3
    assert answer["trace_url"] is None
    internal = LOST[1].internal_request_id
    assert get(client, f"requests/{internal}") == answer


def test_series(client: httpx.Client) -> None:
    answer = get(client, "series", since=factory.START, until=factory.START + 59)
    (point,) = answer["series"]
    assert (answer["step"], point["time"]) == (60, factory.START)
    assert point["requests"] == {"lost": 4, "cold": 2, "full": 3}
    assert point["expected_tokens"] == 7 * 1024
    only_b = get(client, "series", since=factory.START, engine="inc-b1")["series"]
    assert [p["reload"]["count"] for p in only_b] == [3]


def test_export(client: httpx.Client) -> None:
    answer = client.get("/api/v1/export", params={"verdict": "lost"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    records = [decode_record(line) for line in answer.text.splitlines()]
    assert [record.request_id for record in records] == [f"cmpl-000{n}" for n in (3, 2, 1, 0)]
    assert client.get("/api/v1/export", params={"cause": "capacity"}).text == ""


def test_sorted(client: httpx.Client) -> None:
    oldest = get(client, "requests", sort="oldest", limit=2)
    assert names(oldest) == ["cmpl-0000", "cmpl-0001"]
    following = get(client, "requests", sort="oldest", limit=2, cursor=oldest["next_cursor"])
    assert names(following) == ["cmpl-0002", "cmpl-0003"]
    served = [record.request_id for record in reversed(SERVED)]
    assert names(get(client, "requests", sort="served")) == served
    export = client.get("/api/v1/export", params={"sort": "served"}).text.splitlines()
    assert [decode_record(line).request_id for line in export] == served


@pytest.mark.parametrize("path", ["requests", "export"])
def test_what_takes_too_long_says_what_to_change(
    client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_STEPS", 1)
    monkeypatch.setattr(sqlite, "_PATIENCE", -1.0)
    answer = client.get(f"/api/v1/{path}", params={"sort": "lost"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("sort: too few requests pass these filters")
    page = client.get("/requests", params={"sort": "lost", "min_lost": "7"})
    assert page.status_code == 400
    assert "The search was given up" in page.text
    assert 'value="7"' in page.text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("requests?verdict=fine", "Input should be 'full', 'partial', 'lost'"),
        ("requests?cause=fine", "cause: Input should be 'drafter_fallback'"),
        ("requests?since=yesterday", "since: give Unix seconds or a time such as 2026-"),
        ("requests?since=nan", "since: Input should be a finite number"),
        ("requests?limit=0", "limit: Input should be greater than or equal to 1"),
        ("requests?limit=1001", "limit: Input should be less than or equal to 1000"),
        ("requests?min_lost_tokens=-1", "min_lost_tokens: Input should be greater"),
        ("requests?verdit=lost", "verdit: there is no such parameter"),
        ("requests?cursor=next", "cursor: not a cursor of this API"),
        ("requests?engine=", "engine: String should have at least 1 character"),
        ("requests?sort=biggest", "sort: Input should be 'newest', 'oldest', 'lost'"),
        ("requests?sort=lost&cursor=0x1p+0_1", "cursor: not a cursor of this API in this sort"),
        ("incidents?state=new", "state: Input should be 'open' or 'closed'"),
        ("series?step=90", "step: Input should be a multiple of 60"),
        ("series?since=2&until=1", "since: is after until"),
        ("series?since=0", "gives over 10,000 points"),
        ("export?limit=3", "limit: there is no such parameter"),
    ],
)
def test_wrong_parameters(client: httpx.Client, path: str, message: str) -> None:
    answer = client.get(f"/api/v1/{path}")
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    "path", ["engines/x", "incidents/x", "requests/x", "requests?incident=x", "requests/a%2Fb"]
)
def test_what_does_not_exist(client: httpx.Client, path: str) -> None:
    answer = client.get(f"/api/v1/{path}")
    assert answer.status_code == 404
    assert "there is no" in answer.json()["detail"]


def test_an_incident_of_another_engine(client: httpx.Client) -> None:
    ident = get(client, "incidents")["incidents"][0]["id"]
    answer = client.get("/api/v1/requests", params={"incident": ident, "engine": "inc-b1"})
    assert answer.status_code == 422
    assert "is of another engine" in answer.json()["detail"]


def test_operation(client: httpx.Client) -> None:
    assert client.get("/healthz").text == client.get("/readyz").text == "ok\n"
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "kvlens_dashboard_open_incidents 1.0" in plain.text
    openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_openapi_lists_every_endpoint_and_the_allowed_values(client: httpx.Client) -> None:
    spec = client.get("/openapi.json").json()
    assert {
        "/api/v1/engines",
        "/api/v1/engines/{ident}",
        "/api/v1/incidents",
        "/api/v1/incidents/{ident}",
        "/api/v1/requests",
        "/api/v1/requests/{ident}",
        "/api/v1/series",
        "/api/v1/stream",
        "/api/v1/export",
        "/v1/traces",
        "/v1/metrics",
        "/metrics",
        "/healthz",
        "/readyz",
        "/api/v1/audit",
        "/api/v1/sizing",
        "/api/v1/targets",
        *(f"/api/v1/incidents/{{ident}}/{act}" for act in ("acknowledge", "silence", "annotate")),
    } == set(spec["paths"])
    assert spec["components"]["schemas"]["Verdict"]["enum"] == [str(v) for v in Verdict]
    assert client.get("/docs").status_code == 404


@pytest.mark.parametrize("path", ["series", "requests", "export", "audit", "sizing"])
@pytest.mark.parametrize("given", ["-1", "-1.7976931348623157e+308", "1e12", "nan", "inf", "soon"])
def test_times_that_no_clock_shows(client: httpx.Client, path: str, given: str) -> None:
    name = "before" if path == "audit" else "until"
    more = {"engine": "a"} if path == "sizing" else {}
    answer = client.get(f"/api/v1/{path}", params={name: given, **more})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"{name}: ")


def test_the_description_names_what_can_go_wrong(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    answers = {
        (method, path): set(operation["responses"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    assert all("404" in answers[key] for key in answers if "{" in key[1])
    assert all({"413", "400"} < answers[key] for key in answers if key[0] == "post")
    assert {"415", "429", "503"} < answers["post", "/v1/traces"]
    body = paths["/v1/traces"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/x-protobuf", "application/json"}
