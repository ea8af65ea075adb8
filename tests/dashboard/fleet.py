"""A small fleet for the pages: one engine losing every hit, one serving, one odd one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import httpx
import msgspec
from exports import as_json, records_export
from factory import cold_record, engine, lost_record, served_record
from gallery import gap_record, nine_group_engine
from waiting import eventually

from kvlens.telemetry.records import EngineInfo, RequestRecord

Sent = tuple[EngineInfo, Sequence[RequestRecord]]


def fleet(now: float) -> Iterator[Sent]:
    """Exports in the order in which they have to be sent; ``now`` is Unix seconds."""
    day = 86_400.0
    healthy = engine("node-b:0", "inc-b1", affected=False, started_at=now - day)
    served = [
        served_record(
            1000 + index, healthy, chunks=2 + index * 7 % 9, finish=now - 0.9 * day + index * 760
        )
        for index in range(102)
    ]
    yield healthy, served
    repaired = engine("node-c:0", "inc-c1", started_at=now - day)
    yield repaired, [lost_record(i, repaired, finish=now - 0.6 * day + i * 400) for i in range(9)]
    # A later start of the same engine ends that incident.
    again = engine("node-c:0", "inc-c2", affected=False, started_at=now - 0.5 * day)
    yield (
        again,
        [
            served_record(2000 + i, again, chunks=3, finish=now - 0.45 * day + i * 900)
            for i in range(40)
        ],
    )
    large = nine_group_engine(engine("", "", affected=False, started_at=now - 3_600))
    yield large, [gap_record(served_record(7, large), now - 95)]
    affected = engine(started_at=now - 3_600)
    cold = [cold_record(i, affected, finish=now - 3_000 + i * 60) for i in range(12)]
    yield affected, [*cold, *lost_run(affected, now)]


def lost_run(info: EngineInfo, now: float, number: int = 14) -> list[RequestRecord]:
    """Requests that lost everything, the newest half a minute ago."""
    return [
        lost_record(100 + i, info, chunks=1 + i % 3, finish=now - 30 - (number - 1 - i) * 41)
        for i in range(number)
    ]


def send(client: httpx.Client, info: EngineInfo, records: Sequence[RequestRecord]) -> None:
    """Ingest as a connector would; returns once the records are durable."""
    body = as_json(records_export(info, records))
    answer = client.post("/v1/traces", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    assert not answer.json().get("partialSuccess"), answer.text


def open_incident(client: httpx.Client, of: str | None = None) -> str:
    """Id of the open incident, of any engine or of the incarnation ``of``.

    Detection follows the acknowledged ingest, so wait for it.
    """

    def found() -> list[str]:
        incidents = client.get("/api/v1/incidents", params={"state": "open"}).json()["incidents"]
        return [str(item["id"]) for item in incidents if of in (None, item["incarnation_id"])]

    return eventually(found)[0]


def hostile(info: EngineInfo, now: float) -> RequestRecord:
    """Markup wherever a text from outside is shown."""
    markup = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>/../?a=b#c"
    return msgspec.structs.replace(
        lost_record(900, info, finish=now),
        request_id=markup,
        internal_request_id="int-" + markup,
        summary=f"summary {markup}",
        next_step=f"next {markup}",
        evidence={markup: [markup, {"deep": markup}], "ok": True, "none": None, "f": 0.5},
        finish_reason=markup,
    )
