"""Scenario files: what is read, and what is refused with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlens.connector.simulation import scenario
from kvlens.connector.simulation.reading import ScenarioError, parse, read
from kvlens.connector.simulation.scenario import (
    STEPS,
    Repeat,
    ResetGpuCache,
    Scenario,
    Serve,
    chunk_range,
)

GOOD = """\
layout:
  tokens_per_hash: 16
  groups:
    - {kind: full_attention, tokens_per_block: 16, drafter: false}
    - {kind: sliding_window, tokens_per_block: 16, window: 128}
    - {kind: mamba, tokens_per_block: 64}
speculative: mtp
steps:
  - {prompt: {seed: 1, tokens: 1100}, max_tokens: 8, times: 1}
  - {reset_gpu_cache: true}
  - {prompt: {seed: 1, tokens: 1100, diverge_after: 900}, drop_chunks: {0: [1, "3-5"]}}
  - repeat: 3
    steps: [{wait: 1}]
"""


def test_a_scenario_with_defaults():
    found = parse(GOOD)
    served, reset, diverging, repeated = found.steps
    assert isinstance(served, Serve)
    assert (served.prompt.tokens, served.max_tokens, served.together) == (1100, 8, False)
    assert isinstance(reset, ResetGpuCache)
    assert diverging.prompt.diverge_after == 900
    assert [diverging.keeps(0, chunk) for chunk in range(7)] == [
        True, False, True, False, False, False, True,
    ]  # fmt: skip
    assert diverging.keeps(1, 1)
    assert isinstance(repeated, Repeat)
    assert (repeated.repeat, repeated.steps[0].wait) == (3, 1.0)
    assert (found.gpu_blocks, found.offload_prompt_only, found.async_scheduling) == (
        4096, True, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("window: 128", "windw: 128", "f.yaml:5: layout.groups[1].windw: unknown field windw; "
         "allowed: kind, tokens_per_block, window, attention_chunk, drafter"),
        ("window: 128", "drafter: true", "f.yaml:5: layout.groups[1]: a sliding_window group needs "
         "window (tokens)"),
        ("kind: mamba", "kind: mmba", "f.yaml:6: layout.groups[2].kind: invalid enum value 'mmba'; "
         "allowed: full_attention, sliding_window, chunked_local, mamba"),
        ("tokens_per_block: 64", "tokens_per_block: x",
         "f.yaml:6: layout.groups[2].tokens_per_block: expected int, got str"),
        ("tokens_per_block: 64", "tokens_per_block: 0",
         "f.yaml:6: layout.groups[2].tokens_per_block: expected int >= 1"),
        ("mtp", "mpt", "f.yaml:7: speculative: invalid enum value 'mpt'; allowed: none, mtp, "
         "eagle"),
        ("times: 1", "times: 0", "f.yaml:9: steps[0].times: expected int >= 1"),
        ("reset_gpu_cache: true", "reset_gpu_cache: false", "allowed: true"),
        ("reset_gpu_cache: true", "reset: true", "f.yaml:10: steps[1]: a step has exactly one of "
         "the fields prompt, store, reset_gpu_cache, reset_offload_cache, wait, backend, repeat; "
         "this one has none"),
        ("{wait: 1}", "{wait: x}", "f.yaml:13: steps[3].steps[0].wait: expected float, got str"),
        ("seed: 1, ", "", "f.yaml:9: steps[0].prompt: missing field seed; allowed: seed, tokens"),
        ("0: [1", "7: [1", "f.yaml:11: steps[2].drop_chunks: there is no group 7; groups are 0 to "
         "2"),
        ('"3-5"', '"5-3"', "'5-3' is neither a chunk index nor a range"),
        ("tokens_per_hash: 16", "tokens_per_hash: 24", "f.yaml:2: layout.tokens_per_hash: "
         "tokens_per_hash must divide the block of every group: 24 does not divide 16 (group 0)"),
        ("layout:", "lay:", "f.yaml:1: lay: unknown field lay; allowed: layout, steps"),
        ("speculative: mtp", "layout: 3", "f.yaml:7: layout: given twice"),
        ("speculative: mtp", "speculative: [mtp", "f.yaml:8: not valid YAML"),
        ("tokens: 1100, div", "tokens: 100, div", "f.yaml:11: steps[2].prompt.diverge_after: "
         "diverge_after must lie within the prompt: 900 of 100"),
        (GOOD, "- a", "f.yaml:1: a scenario is a mapping"),
        (GOOD, "", "a scenario is a mapping"),
        ("wait: 1", "wait: 1, times: 2", "unknown field times; allowed: wait"),
        ("wait: 1", "wait: 1, reset_gpu_cache: true", "this one has reset_gpu_cache and wait"),
        ("{kind: mamba, tokens_per_block: 64}", "{kind: mamba, tokens_per_block: 64}\n"
         "    - {kind: mamba, tokens_per_block: 32}", "one block size for all mamba groups"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_line_field_and_what_is_allowed(right, wrong, said):
    assert right in GOOD
    with pytest.raises(ScenarioError) as refused:
        parse(GOOD.replace(right, wrong), "f.yaml")
    assert said in str(refused.value)
    assert str(refused.value).startswith("f.yaml")


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ScenarioError, match="cannot be read: No such file"):
        read(tmp_path / "none.yaml")


def test_chunk_ranges():
    assert list(chunk_range(7)) == [7]
    assert list(chunk_range("7-9")) == [7, 8, 9]
    assert 10**6 in chunk_range("7-")
    for wrong in ("", "a", "3-1", "-3", -1):
        with pytest.raises(ValueError, match="neither a chunk index nor a range"):
            chunk_range(wrong)


def test_every_field_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
    parts = [Scenario, scenario.Layout, scenario.Group, scenario.Prompt, *STEPS.values()]
    parts += [scenario.BackendState, scenario.TransferSteps]
    fields = {field for part in parts for field in part.__struct_fields__}
    assert {field for field in fields if f"`{field}" not in text and f"{{{field}" not in text} <= {
        "load",  # beside store, in one pair of braces
    }


def test_the_documented_example_is_one():
    text = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert parse(example).capacity_chunks == 600
