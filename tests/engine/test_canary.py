"""The canary on real servers: with kvlens' lookups, and with a tier that loads wrong bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import NEWEST, serve

from kvlens.dashboard.cli import main

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = ["--turns", "3", "--prompt-tokens", "700", "--output-tokens", "8", "--vocab", "512"]
OPTIONS: dict[str, Any] = {
    "chunk_tokens": 128,
    "gpu_blocks": 96,
    # Lets the canary empty the GPU cache.
    "env": {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path(__file__).parent)},
}


def canary(url: str, conversations: int, folder: Path) -> tuple[int, dict[str, Any]]:
    path = folder / "report.json"
    code = main(["canary", url, "--conversations", str(conversations), *SMALL, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_exact_lookups_give_the_recomputed_answers(tiny_model: Path, tmp_path: Path) -> None:
    with serve(NEWEST, tiny_model, tmp_path, {"lookup": "exact"}, **OPTIONS) as server:
        code, report = canary(server.url, 10, tmp_path)
    assert (code, report["status"]) == (0, "ok"), report
    assert report["conversations"] == report["reloaded_conversations"] == 10
    assert report["served_tokens"] > 0
    assert report["evicted_by"] == "reset"
    assert report["mismatches"] == []
    assert report["unstable_answers"] == report["unattributed_answers"] == 0


def test_a_tier_that_loads_wrong_bytes_is_found(tiny_model: Path, tmp_path: Path) -> None:
    broken = {"spec_name": "ForgetfulSpec", "spec_module_path": "broken_memory"}
    with serve(NEWEST, tiny_model, tmp_path, {}, extra_config=broken, **OPTIONS) as server:
        code, report = canary(server.url, 3, tmp_path)
    assert (code, report["status"]) == (1, "mismatch")
    # Wrong KV shows in nearly every answer that used it, and in no other.
    assert len(report["mismatches"]) > report["reloaded_answers"] / 2
    assert all(one["reloaded_tokens"] for one in report["mismatches"])
