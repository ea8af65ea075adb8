"""`kvlens simulate` from its arguments to its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlens.dashboard.cli import main

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def test_several_files_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    files = [str(SCENARIOS / f"{name}.yaml") for name in ("f03_single_chunk", "n06_skip_reading")]
    assert main(["simulate", *files, "--json", str(out)]) == 0
    first, second = json.loads(out.read_text())
    assert (first["scenario"], second["scenario"]) == ("f03_single_chunk", "n06_skip_reading")
    assert first["lookup"] == "corrected"
    assert [r["verdict"] for r in second["requests"]] == ["cold", *["skipped"] * 4]
    printed = capsys.readouterr().out
    assert "f03_single_chunk: vLLM " in printed
    assert "n06_skip_reading: vLLM " in printed


def test_a_critical_incident_is_exit_code_1(tmp_path: Path):
    stalled = tmp_path / "stalled.yaml"
    stalled.write_text(
        "layout: {groups: [{kind: full_attention, tokens_per_block: 256}, "
        "{kind: sliding_window, tokens_per_block: 256, window: 256}]}\n"
        "steps:\n"
        "  - {prompt: {seed: 1, tokens: 1100}, only_chunks: {1: []}}\n"
        "  - repeat: 4\n"
        "    steps:\n"
        "      - {reset_gpu_cache: true}\n"
        "      - {prompt: {seed: 1, tokens: 1100}, only_chunks: {1: []}}\n"
    )
    out = tmp_path / "out.json"
    assert main(["simulate", str(stalled), "--json", str(out)]) == 1
    (scenario,) = json.loads(out.read_text())
    incident = next(i for i in scenario["incidents"] if i["kind"] == "zero_hit")
    assert (incident["severity"], incident["cause"]) == ("critical", "window_veto")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layout: {}\nsteps: []", "bad.yaml:1: layout: missing field groups"),
        ("layout: {groups: [{kind: full_attention, tokens_per_block: 16}]}\n"
         "gpu_blocks: 4\npatience: 1\nsteps: [{prompt: {seed: 1, tokens: 300}}]",
         "bad.yaml: steps[0]: r1 did not end"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_code_2(text: str, said: str, tmp_path: Path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text(text)
    assert main(["simulate", str(bad)]) == 2
    assert said in capsys.readouterr().err


def test_a_scenario_that_cannot_run_does_not_stop_the_others(tmp_path: Path, capsys):
    stuck = tmp_path / "stuck.yaml"
    stuck.write_text(
        "layout: {groups: [{kind: full_attention, tokens_per_block: 16}]}\n"
        "gpu_blocks: 4\npatience: 1\nsteps: [{prompt: {seed: 1, tokens: 300}}]"
    )
    out = tmp_path / "out.json"
    other = str(SCENARIOS / "f03_single_chunk.yaml")
    assert main(["simulate", str(stuck), other, "--json", str(out)]) == 2
    assert [scenario["scenario"] for scenario in json.loads(out.read_text())] == [
        "f03_single_chunk"
    ]
    assert "stuck.yaml: steps[0]" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written(tmp_path: Path, capsys):
    file = str(SCENARIOS / "f03_single_chunk.yaml")
    assert main(["simulate", file, "--json", str(tmp_path / "none" / "out.json")]) == 2
    assert "No such file" in capsys.readouterr().err
