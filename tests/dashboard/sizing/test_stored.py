"""The curve of an engine and a window, over HTTP, against the same records as a trace."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import msgspec
import pytest
from factory import cold_record, engine
from fleet import send

from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.sizing.measure import Question, measure
from kvlens.telemetry.sizing.reading import Trace

BLOCK = 64


def conversations(info: EngineInfo, now: float, number: int = 60) -> list[RequestRecord]:
    """Ten conversations in turn behind one system prompt, each turn four blocks longer."""
    records, paths, numbered = [], [[(0, 1)] for _ in range(10)], 2
    for index in range(number):
        path = paths[index % 10]
        path.append((numbered, numbered + 3))
        numbered += 4
        blocks = sum(last - first + 1 for first, last in path)
        records.append(
            msgspec.structs.replace(
                cold_record(index, info, finish=now - 3000 + index * 10),
                prompt_tokens=blocks * BLOCK + 9,
                prefix_blocks=list(path),
                prefix_block_tokens=BLOCK,
            )
        )
    return records


@pytest.fixture
def filled(client: httpx.Client) -> httpx.Client:
    now = time.time()
    info = engine("node-a:0", "inc-a", started_at=now - 3600)
    send(client, info, conversations(info, now))
    other = engine("node-b:0", "inc-b", started_at=now - 3600)
    send(client, other, [cold_record(900 + i, other, finish=now - 60 + i) for i in range(3)])
    return client


def test_the_curve_is_that_of_the_same_requests_as_a_trace(
    filled: httpx.Client, tmp_path: Path
) -> None:
    said = filled.get("/api/v1/sizing", params={"engine": "node-a:0"}).json()
    export = tmp_path / "export.jsonl"
    export.write_bytes(filled.get("/api/v1/export", params={"engine": "inc-a"}).content)
    trace = Trace(export)
    alone = measure(trace, lambda: trace.block_tokens, Question())
    assert trace.format == "export"
    assert (said["requests"], said["blocks"]) == (60, alone.blocks)
    assert said["ceiling"] == pytest.approx(alone.ceiling.block_ratio)
    assert [(p["blocks"], p["block_ratio"], p["token_ratio"]) for p in said["curve"]] == [
        pytest.approx(point) for point in alone.curve
    ]
    assert said["now"]["chunks"] == pytest.approx(293, rel=0.05)


def test_a_window_holds_what_finished_in_it(filled: httpx.Client) -> None:
    now = time.time()
    part = {"engine": "inc-a", "since": now - 3005, "until": now - 2805}
    said = filled.get("/api/v1/sizing", params=part).json()
    assert 15 <= said["requests"] <= 25
    answer = filled.get("/api/v1/sizing", params={"engine": "inc-a", "until": 5})
    assert answer.status_code == 404
    assert "names its blocks in this range" in answer.json()["detail"]
    assert filled.get("/api/v1/sizing", params={"engine": "none"}).status_code == 404
    wrong = {"engine": "inc-a", "since": 9, "until": 5}
    assert filled.get("/api/v1/sizing", params=wrong).status_code == 422


def test_the_page_shows_it(filled: httpx.Client) -> None:
    html = filled.get("/sizing", params={"engine": "inc-a", "range": "1h"}).text
    assert html.count("<h1") == 1
    assert "<style" not in html
    assert " style=" not in html
    assert "95\N{NO-BREAK SPACE}% of what any tier could" in html
    assert html.count('<svg class="size-svg"') == 2
    assert "60 requests" in html
    assert "/sizing?engine=inc-a&amp;range=24h" in filled.get("/engines/inc-a").text


def test_an_engine_whose_requests_name_no_block(filled: httpx.Client) -> None:
    answer = filled.get("/sizing", params={"engine": "inc-b"})
    assert answer.status_code == 200
    assert "names its blocks" in answer.text
    assert filled.get("/sizing", params={"engine": "none"}).status_code == 404
