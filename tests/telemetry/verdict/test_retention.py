"""What vLLM's retention keeps of windowed groups is a matter of policy, not of loss."""

from __future__ import annotations

import random

from random_layouts import random_layout
from recording import Engine, engine

from kvlens.telemetry.assembly import accounting
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.verdict import oracle
from kvlens.telemetry.verdict.oracle import servable_boundary


def windowed(interval: int | None, drafter: bool = False) -> Engine:
    """Full attention beside a window of 32 tokens, both with chunks of 16."""
    groups = [
        GroupLayout(kv_group=0, group_kind="full_attention", tokens_per_block=16,
                    tokens_per_chunk=16),
        GroupLayout(kv_group=1, group_kind="sliding_window", tokens_per_block=16,
                    tokens_per_chunk=16, window=32, drafter=drafter),
    ]  # fmt: skip
    layout = Layout(groups=groups, tokens_per_hash=16)
    return Engine(engine(layout=layout, retention_interval=interval))


def serve_and_diverge(run: Engine, kept: list[int], common: int, tokens: int = 130):
    """One prompt of which the tier keeps some window chunks, then one that shares a part of it."""
    attention, window = run.keys("doc", 130)
    run.add("a", 130)
    run.look("a", "doc", 130, 0, [(0, 8, 0)])
    run.admit("a", 0)
    stored = attention + [window[chunk] for chunk in kept]
    run.store("a", stored, stored)
    run.finish("a", "doc", 130)
    run.settle()
    run.add("b", tokens)
    run.look("b", "doc", common, 0, [(0, common // 16, common // 16), (1, common // 16, 0)])
    run.admit("b", 0)
    run.finish("b", "doc", common)
    return run.settle()[-1]


def test_a_prompt_that_diverges_before_the_kept_window_has_lost_nothing():
    record = serve_and_diverge(windowed(0), kept=[6, 7], common=80)
    assert (record.verdict, record.cause, record.lost_tokens) == ("unstored", "policy", 0)
    assert record.evidence["retention_interval"] == 0
    assert "prefix_cache_retention_interval is 0" in record.next_step


def test_without_retention_the_same_is_a_loss():
    record = serve_and_diverge(windowed(None), kept=[6, 7], common=80)
    assert (record.verdict, record.cause, record.lost_tokens) == ("lost", "window_veto", 79)


def test_the_window_at_the_prompts_own_end_must_be_there():
    record = serve_and_diverge(windowed(0), kept=[7], common=130)
    assert (record.verdict, record.cause, record.vetoing_group) == ("lost", "window_veto", 1)
    assert record.expected_tokens == 128


def test_an_interval_keeps_windows_in_between():
    info, group = windowed(64).info, windowed(64).info.layout.groups[1]
    assert accounting.retained_chunks(info, group, 130) == {2, 3, 6, 7}
    info = windowed(64, drafter=True).info
    assert accounting.retained_chunks(info, info.layout.groups[1], 130) == {2, 3, 4, 5, 6, 7}


def test_the_boundary_of_a_whole_prompt_is_the_oracles():
    draw = random.Random(3)
    for _ in range(300):
        layout, tokens = random_layout(draw), draw.randint(1, 200)
        if any(group.attention_chunk for group in layout.groups):
            continue  # may need nothing at all, and then reaches beyond its last complete chunk
        every = servable_boundary(layout, lambda *_: True, 0, tokens)
        assert oracle.whole_boundary(layout, tokens) == every, (layout, tokens)
