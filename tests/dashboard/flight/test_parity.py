"""The same traffic, live and as a recording, gives the same incidents: every field of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exports
import factory
import field
import httpx
import msgspec
import pytest
from waiting import eventually

from kvlens.dashboard.cli import main
from kvlens.dashboard.settings import load_settings
from kvlens.telemetry import semconv
from kvlens.telemetry.flight.files import FlightFiles
from kvlens.telemetry.flight.recorder import FlightRecorder
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode

START = factory.START
KILLED = factory.engine()
NEXT = factory.engine(incarnation_id="inc-a2", started_at=START + 700)
OTHER = factory.engine("node-b:0", "inc-b1", affected=False, started_at=START + 0.5)
STOP_FRAME = 10
"""Bytes cut off, so that the note of an orderly end is torn: a killed engine writes none."""

Observation = tuple[EngineInfo, RequestRecord, bool]
"""Engine, record, whether the request still waits."""


def at(record: RequestRecord, info: EngineInfo, seconds: float) -> RequestRecord:
    loads = [msgspec.structs.replace(load, time=START + seconds - 0.5) for load in record.loads]
    return msgspec.structs.replace(
        record,
        finish_time=START + seconds,
        arrival_time=START + seconds - 0.8,
        loads=loads,
        engine_id=info.engine_id,
        incarnation_id=info.incarnation_id,
        internal_request_id=f"{record.internal_request_id}-{info.incarnation_id}-{seconds}",
    )


def night() -> Iterator[Observation]:
    """Two lives of one engine, the first killed, and another engine beside them."""
    for n in range(12):  # a run that recovers after ten served in a row, and a rate from then on
        yield KILLED, at(factory.lost_record(n), KILLED, 10 + n), False
    for n in range(12):
        yield KILLED, at(field.served(n), KILLED, 30 + n), False
    for n in range(40):
        yield KILLED, at(field.partial(n, 512 if n % 2 else 1024), KILLED, 60 + n), False
    for n in range(5):
        yield KILLED, at(field.gap(n), KILLED, 110 + n), False
    for seconds in (1.0, 6.0, 11.0, 16.0):
        waits = field.waiting(0, seconds, START + 140 + seconds)
        yield KILLED, msgspec.structs.replace(waits, internal_request_id="waits"), True
    unsafe = {"verdict": "unsafe", "cause": "misaligned_state", "evidence": {"boundary": 176}}
    yield KILLED, at(field.served(1, **unsafe), KILLED, 165), False
    for n in range(9):
        yield KILLED, at(factory.lost_record(n), KILLED, 170 + n), False  # open when it is killed
    for n in range(4):
        yield OTHER, at(field.evicted(n), OTHER, 190 + n), False
    for n in range(40):
        yield OTHER, at(field.load(n, 0.05, info=OTHER), OTHER, 200 + n), False
    for n in range(40):
        yield OTHER, at(field.load(n, 0.5, info=OTHER), OTHER, 600 + n), False
    for n in range(20):
        yield OTHER, at(field.refusing(n, 3, 4), OTHER, 650 + n), False
    for n in range(5):
        yield NEXT, at(factory.lost_record(n), NEXT, 710 + n), False
    yield OTHER, at(field.served(99, OTHER, dropped=7), OTHER, 730), False


def record(folder: Path) -> None:
    """What the engines' flight recorders write; none of the engines ends in order."""
    recorders: dict[str, FlightRecorder] = {}
    for info, seen, waits in night():
        recorder = recorders.get(info.incarnation_id)
        if recorder is None:
            recorder = FlightRecorder(FlightFiles(folder, info, 64 * 1024 * 1024))
            recorders[info.incarnation_id] = recorder
        (recorder.deferral if waits else recorder.request)(seen)
    for recorder in recorders.values():
        recorder.close()
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-STOP_FRAME])


def tell(client: httpx.Client, together: int) -> None:
    """Send the same over OTLP, ``together`` observations of one engine in an export."""
    waiting: list[tuple[EngineInfo, Any]] = []

    def send() -> None:
        body = exports.export(waiting[0][0], *(span for _, span in waiting))
        answer = client.post(
            "/v1/traces",
            content=exports.as_json(body),
            headers={"content-type": "application/json"},
        )
        assert answer.json() == {}
        waiting.clear()

    for info, seen, waits in night():
        if waiting and (len(waiting) >= together or waiting[0][0] is not info):
            send()
        span = (
            exports.span(
                semconv.SPAN_DEFERRAL,
                seen.finish_time,
                {semconv.ATTR_RECORD: encode(seen)},
                (f"{1:032x}", f"{1:016x}"),
            )
            if waits
            else exports.request_span(seen)
        )
        waiting.append((info, span))
    send()


@pytest.fixture
def replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    record(tmp_path / "recordings")
    out = tmp_path / "replay.json"
    assert main(["replay", str(tmp_path / "recordings"), "--json", str(out)]) == 1
    assert capsys.readouterr().err.count("was not written to its end") == 3
    return {one["id"]: one for one in json.loads(out.read_text())["incidents"]}


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_live_and_replay(client: httpx.Client, replayed: dict[str, Any], together: int) -> None:
    tell(client, together)

    def live() -> dict[str, Any]:
        found = client.get("/api/v1/incidents", params={"limit": 1000}).json()["incidents"]
        return {one.pop("id"): one for one in found}

    eventually(lambda: live().keys() == replayed.keys())
    found = live()
    for ident, incident in replayed.items():
        del found[ident]["handling"]
        assert found[ident] == {k: v for k, v in incident.items() if k != "id"}, ident
    assert {one["kind"] for one in found.values()} >= {
        "zero_hit",
        "lost_hits",
        "store_gaps",
        "capacity_thrash",
        "deferral_stall",
        "slow_reload",
        "store_failures",
        "unsafe_boundary",
        "telemetry_lost",
    }
    ends = {(one["incarnation_id"], one["close_reason"]) for one in found.values()}
    assert ("inc-a1", "engine_gone") in ends  # by the start of its next life
    assert ("inc-a1", "recovered") in ends
    assert ("inc-a2", None) in ends


def test_with_the_same_thresholds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay takes the settings that the dashboard takes, those of single models too."""
    record(tmp_path / "recordings")
    monkeypatch.setenv(
        "KVLENS_MODEL_THRESHOLDS", json.dumps({factory.MODEL: {"zero_hit_requests": 4096}})
    )
    out = tmp_path / "replay.json"
    main(["replay", str(tmp_path / "recordings"), "--json", str(out)])
    assert "zero_hit" not in {one["kind"] for one in json.loads(out.read_text())["incidents"]}
    assert load_settings().thresholds(factory.MODEL).zero_hit_requests == 4096
