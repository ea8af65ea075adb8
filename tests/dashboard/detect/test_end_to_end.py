"""From spans of a connector to incidents on the API: waiting requests, thresholds of a model."""

from __future__ import annotations

from pathlib import Path

import factory
import httpx
import msgspec
import pytest
from exports import as_json, export, span
from field import partial, waiting
from fleet import send
from waiting import eventually

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings, SettingsError, load_settings
from kvlens.telemetry import semconv
from kvlens.telemetry.records import encode

INFO = factory.engine()


def incidents(client: httpx.Client, least: int) -> dict[str, str]:
    """Severity by kind, once there are so many; detection follows the acknowledged ingest."""

    def found() -> list[dict[str, str]] | None:
        incidents = client.get("/api/v1/incidents").json()["incidents"]
        return incidents if len(incidents) >= least else None

    return {incident["kind"]: incident["severity"] for incident in eventually(found) or []}


def test_a_stall_is_told_while_the_request_waits(client: httpx.Client) -> None:
    record = waiting(0, 11, factory.START + 11)
    attributes = {semconv.ATTR_RECORD: encode(record)}
    body = export(
        INFO,
        span(semconv.SPAN_DEFERRAL, record.finish_time, attributes, (f"{1:032x}", f"{1:016x}")),
    )
    answer = client.post(
        "/v1/traces", content=as_json(body), headers={"content-type": "application/json"}
    )
    assert answer.json() == {}
    assert incidents(client, 1) == {"deferral_stall": "warning"}
    assert client.get("/api/v1/requests").json()["requests"] == []  # it has not finished


def test_a_report_that_cannot_be_read_is_rejected(client: httpx.Client) -> None:
    record = msgspec.structs.replace(waiting(0, 11, factory.START + 11), verdict="unheard_of")
    attributes = {semconv.ATTR_RECORD: encode(record)}
    body = export(
        INFO,
        span(semconv.SPAN_DEFERRAL, record.finish_time, attributes, (f"{1:032x}", f"{1:016x}")),
    )
    answer = client.post(
        "/v1/traces", content=as_json(body), headers={"content-type": "application/json"}
    )
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"


def test_an_incident_page_lists_the_requests_in_its_scope(client: httpx.Client) -> None:
    lossy = [
        partial(n, 512 if n < 8 else 1024, **({} if n < 8 else {"verdict": "full"}))
        for n in range(12)
    ]
    send(client, INFO, lossy)
    incidents(client, 1)
    (found,) = client.get("/api/v1/incidents").json()["incidents"]
    assert (found["kind"], found["scope"]["min_lost_tokens"]) == ("lost_hits", 1)
    page = client.get(f"/incidents/{found['id']}").text
    assert "cmpl-0007" in page
    assert "cmpl-0009" not in page


def test_a_model_may_have_thresholds_of_its_own(tmp_path: Path) -> None:
    changed = {"other": {"lost_hits_share": 0.01}, factory.MODEL: {"lost_hits_share": 0.9}}
    settings = Settings(store=str(tmp_path / "k.db"), port=0, model_thresholds=changed)
    other = factory.engine("node-o:0", "inc-o", model="other")
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as client:
        for info in (INFO, other):
            records = [
                msgspec.structs.replace(
                    partial(n),
                    engine_id=info.engine_id,
                    model=info.model,
                    incarnation_id=info.incarnation_id,
                )
                for n in range(5)
            ]
            send(client, info, records)
        assert incidents(client, 1) == {"lost_hits": "warning"}
        (found,) = client.get("/api/v1/incidents").json()["incidents"]
        assert found["model"] == "other"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": {"lost_hits": 0.5}}, "no such threshold; known are .*lost_hits_share"),
        ({"m": {"lost_hits_share": 2}}, "model_thresholds of 'm': lost_hits_share: .*less than 1"),
        ({"m": {"zero_hit_requests": 2.5}}, "zero_hit_requests"),
        ({"m": 3}, "valid dictionary"),
    ],
)
def test_thresholds_that_cannot_be_are_named(changes: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(model_thresholds=changes)


def test_thresholds_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_LOST_HITS_SHARE", "0.25")
    monkeypatch.setenv("KVLENS_MODEL_THRESHOLDS", '{"m": {"zero_hit_requests": 9}}')
    settings = load_settings()
    assert settings.thresholds("m").lost_hits_share == 0.25
    assert settings.thresholds("m").zero_hit_requests == 9
    assert settings.thresholds("n").zero_hit_requests == 3
