"""The next release, made up: private names of vLLM renamed, parameters added, at random."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvlens.connector import support

HERE = Path(__file__).parent
SCENARIO = HERE.parent / "scenarios" / "f12_state_of_last_token.yaml"
VARIANTS = 40

pytestmark = pytest.mark.skipif(
    not support.vllm_version().startswith("0.33"), reason="the changes are made to 0.33.0"
)


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, HERE / "mutants.py", SCENARIO, "0", str(VARIANTS)]
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
    lines = [line.partition("RESULT ")[2] for line in ran.stdout.splitlines() if "RESULT " in line]
    told = [json.loads(line) for line in lines]
    assert [one["seed"] for one in told] == [None, *range(VARIANTS)]
    return told


def test_unchanged_it_is_seen_at_groups_depth(results):
    assert "error" not in results[0], results[0]["error"]
    assert (results[0]["depth"], results[0]["not_seen"]) == ("groups", [])
    assert any(results[0]["served"])


def test_every_variant_serves_what_stock_serves_and_is_recorded(results):
    for one in results[1:]:
        assert "error" not in one, (one["changes"], one["error"])
        assert one["served"] == one["stock"] == results[0]["served"], one
        assert one["depths"] in (["groups"], ["interface"]), one


def test_only_what_depends_on_a_change_is_lost(results):
    depths = [one["depth"] for one in results[1:]]
    assert depths.count("interface") >= 10
    assert depths.count("groups") >= 5
    for one in results[1:]:
        assert one["depth"] == "groups" or one["not_seen"], one
