"""A real engine's recording: complete after kill -9, and replayed to the same numbers."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from harness import NEWEST, serve

from kvlens.dashboard.cli import main
from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.dashboard.flight.recordings import load
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REQUESTS = 1 + 4 * 2  # a warm-up comes first
PLAN = Traffic(documents=4, rounds=2, prompt_tokens=1100, output_tokens=4, vocab=model.TINY.vocab)


def test_a_killed_engine_leaves_every_record(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recordings"
    with serve(NEWEST, tiny_model, tmp_path, {"flight_recorder": str(folder)}) as server:
        server.play(PLAN, "flight")
        server.flush(REQUESTS)
        served = server.metric(semconv.SERVED_TOKENS.exposed_name)
        assert server.metric(semconv.DROPPED_RECORDS.exposed_name) == 0
        (line,) = server.log_lines("lookup corrected, groups")
        pid = re.search(r"\(pid (\d+)\)", line)
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
    (recording,) = load([folder])
    records = [entry.record for entry in recording if "flight" in entry.record.request_id]
    assert recording.stopped_at is None
    assert len({record.request_id for record in records}) == REQUESTS
    assert sum(record.served_tokens for record in records) == served
    assert served

    assert main(["inspect", str(folder), "--verdict", "full", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one["served_tokens"] for one in shown)
    assert main(["replay", str(folder), "--json", str(tmp_path / "replay.json")]) == 0
    replayed = json.loads((tmp_path / "replay.json").read_text())
    assert replayed["incidents"] == []
    assert replayed["not_replayed"] == 0
    assert replayed["would_serve"]["corrected"] == replayed["would_serve"]["exact"] == served

    (file,) = folder.iterdir()
    assert main(["size", str(file), "--json", str(tmp_path / "size.json")]) == 0
    sized = json.loads((tmp_path / "size.json").read_text())
    assert sized["requests"] >= REQUESTS - 1  # the warm-up may be shorter than a block
    assert sized["ceiling"] > 0.4  # each document was asked for twice
