"""A second engine in one process starts with fresh metrics, and does not trip over the first."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from harness import NEWEST, TINY_OPTIONS, python_of

from kvlens.dashboard.demo import engine
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_engines_in_one_process(tiny_model: Path) -> None:
    options = engine.EngineOptions(
        python=python_of(NEWEST), model=tiny_model, engine_id="restart", **TINY_OPTIONS
    )
    command = engine.command(options, port=1)
    script = Path(__file__).with_name("restart.py")
    arguments = command[command.index("vllm.entrypoints.openai.api_server") + 1 :]
    run = subprocess.run(
        [options.python, str(script), *arguments],
        env={**os.environ, **engine._ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = json.loads(run.stdout.splitlines()[-1])
    assert first["at_start"] == second["at_start"] == 0
    assert first["cold"] == second["cold"] == 1
    assert first["ours"] == second["ours"] == len(semconv.METRICS)
