"""Engines and requests of which only the public connector interface was seen."""

import time

import httpx
import msgspec
from factory import engine, lost_record
from fleet import send

GONE = "OffloadingConnectorScheduler._jobs is gone; without it there is no groups depth"


def test_pages_say_how_deep_they_see(client: httpx.Client) -> None:
    info = msgspec.structs.replace(
        engine(), depth="interface", tested=False, vllm_version="0.99.0", not_seen=[GONE],
        corrections=[], connector="SimpleCPUOffloadConnector",
    )  # fmt: skip
    now = time.time()
    records = []
    for number in range(3):
        record = lost_record(number, info, finish=now - 5 + number)
        lookups = [msgspec.structs.replace(record.lookups[-1], groups=[], vetoing_group=None)]
        records.append(
            msgspec.structs.replace(
                record,
                depth="interface",
                connector=info.connector,
                lookups=lookups,
                cause=None,
                causes=[],
                vetoing_group=None,
                confidence="likely",
                stores=[],
                evidence={},
                next_step="",
            )
        )
    send(client, info, records)
    page = client.get(f"/engines/{info.incarnation_id}").text
    watched = "connector SimpleCPUOffloadConnector"
    for text in ("not seen at interface depth", "untested", GONE, watched):
        assert text in page
    shown = client.get(f"/requests/{records[0].internal_request_id}")
    assert shown.status_code == 200
    assert "This engine is seen at interface depth" in shown.text
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        incidents = client.get("/api/v1/incidents").json()["incidents"]
        if incidents:
            break
        time.sleep(0.05)
    assert [incident["kind"] for incident in incidents] == ["zero_hit"]
    assert client.get(f"/incidents/{incidents[0]['id']}").status_code == 200
