"""The main job, end to end, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_demo_shows_the_defect_and_its_correction(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "kvlens.dashboard.cli", "demo", "--no-serve", "--port", "0"]
    run = subprocess.run(
        [*command, "--json", str(output)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(output.read_text())
    stock, kvlens = document["arms"]["stock"], document["arms"]["kvlens"]
    assert document["vllm_version"] == "0.29.0"
    assert stock["stored_bytes"] > 0
    assert stock["loaded_bytes"] == stock["external_hits"] == stock["served_tokens"] == 0
    # Two rounds of four prompts, of which four chunks of 896 tokens each can be reused.
    assert stock["servable_tokens"] == kvlens["servable_tokens"] == 2 * 4 * 4 * 896
    [incident] = stock["incidents"]
    assert (incident["kind"], incident["state"]) == ("zero_hit", "open")
    assert incident["cause"] == "drafter_fallback"
    assert incident["evidence"]["drafter_groups"] == [0, 1, 2, 3, 4]
    assert kvlens["served_tokens"] == kvlens["external_hits"] == kvlens["servable_tokens"]
    assert kvlens["incidents"] == []
    assert stock["outputs_identical"]
    assert kvlens["outputs_identical"]
    assert kvlens["reload_seconds"] < kvlens["recompute_seconds"]
    assert "zero_hit" in run.stdout
