"""The benchmark of the dashboard runs: on a small store, for its numbers' sake only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_query_and_budget_of_the_benchmark_is_measured(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "dashboard.py"), "--no-peer", "--records", "2000",
        "--repeat", "1", "--ingest", "100", "--rounds", "1", "--folder", str(tmp_path),
        "--json", str(tmp_path / "result.json"),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode in (0, 1), run.stderr[-3000:]  # 1: a budget is not kept on this machine
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["budgets"]) == 3
    assert result["full"]["rate"]["requests"] == 100
    measured = [row["name"] for row in result["queries"]]
    assert len(measured) == len(set(measured)) > 30
    assert all(name in run.stdout for name in measured)
