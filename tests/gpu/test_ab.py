"""The A/B with real CUDA transfers. Skipped where there is no NVIDIA GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ab import has_cuda, missing, run_demo

PYTHON = os.environ.get("KVLENS_DEMO_ENGINE_PYTHON", sys.executable)
SHOWN: dict[str, Any] = {
    "served_tokens": 512,
    "servable_tokens": 512,
    "loaded_bytes": 1,
    "outputs_identical": True,
    "incidents": [],
    "records": 13,
    "requests": 13,
}


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_demo_on_a_gpu(tmp_path: Path) -> None:
    if not has_cuda(PYTHON):
        pytest.skip(f"PyTorch of {PYTHON} sees no NVIDIA GPU (docs/gpu.md)")
    path = tmp_path / "gpu.json"
    code = run_demo(PYTHON, path)
    assert path.exists(), f"the demo ended with exit code {code}"
    assert missing(code, json.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"served_tokens": 0}, "kvlens: served 0 of 512"),
        ({"loaded_bytes": 0}, "kvlens: nothing was loaded"),
        ({"outputs_identical": False}, "kvlens: outputs differ"),
        ({"records": 12}, "kvlens: 12 records of 13 requests"),
    ],
)
def test_what_counts_as_shown_on_a_newer_engine(
    change: dict[str, Any], message: str | None
) -> None:
    document = {"vllm_version": "0.33.0", "arms": {"stock": SHOWN, "kvlens": {**SHOWN, **change}}}
    assert missing(1, document) == ([] if message is None else [message])


def test_an_affected_engine_must_show_all_that_the_demo_does() -> None:
    document = {"vllm_version": "0.29.0+cu129", "failed": ["x"], "arms": {}}
    assert missing(1, document) == ["x"]
    assert missing(0, {**document, "failed": []}) == []
