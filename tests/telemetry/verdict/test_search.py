"""What the model of vLLM's search tells of a lookup.

``tests/connector/test_search_model.py`` holds it against the real class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import Exit
from kvlens.telemetry.verdict.search import replay_queries, search


def group(kv_group: int, kind: str, chunk: int, **fields: Any) -> GroupLayout:
    return GroupLayout(
        kv_group=kv_group, group_kind=kind, tokens_per_block=chunk, tokens_per_chunk=chunk, **fields
    )


def layout(*groups: GroupLayout) -> Layout:
    return Layout(groups=list(groups), tokens_per_hash=1)


def full(kv_group: int, chunk: int, drafter: bool = False) -> GroupLayout:
    return group(kv_group, "full_attention", chunk, drafter_used=drafter)


def mamba(kv_group: int, chunk: int, drafter: bool = False) -> GroupLayout:
    return group(kv_group, "mamba", chunk, drafter_used=drafter)


@pytest.mark.parametrize(
    ("groups", "local", "tokens", "asked", "exit_", "veto", "answers"),
    [
        # F1, one stored chunk: found in the first group, popped, nothing left
        ([full(0, 2128, True), mamba(1, 2128, True)], 0, 5000, [(0, 0, 2, 1)],
         Exit.POPPED_OUT, 0, [(0, 1, 0, 1)]),
        # F7: the pop shrinks the boundary below the coarser sibling's chunk
        ([full(0, 16, True), mamba(1, 64)], 0, 81, [(0, 0, 4, 4)],
         Exit.POPPED_OUT, 0, [(0, 1, 48, 1)]),
        # F5: every other group holds the prompt, one window holds nothing
        ([full(0, 816), group(1, "sliding_window", 816, window=4)], 0, 84865,
         [(0, 0, 104, 104), (1, 0, 104, 0)], Exit.VETOED, 1, [(0, 0, 84864, 1), (1, 0, 0, 1)]),
        ([full(0, 16)], 0, 81, [(0, 0, 5, 0)], Exit.MISS, None, [(0, 0, 0, 1)]),
        ([full(0, 512)], 1008, 1100, [], Exit.COVERED, None, []),  # N9
        ([full(0, 16), mamba(1, 64)], 0, 300, [(0, 0, 16, 3)],
         Exit.BELOW_CHUNK, 0, [(0, 0, 48, 1)]),
        ([full(0, 16)], 0, 81, [(0, 0, 5, None)], Exit.DEFERRED_BACKEND, None, [(0, 0, 80, 1)]),
        # F13 on stock: the boundary is lowered under the state, and stays there
        ([full(0, 16), mamba(1, 64)], 0, 300, [(0, 0, 16, 11), (1, 0, 3, 3)],
         Exit.SERVED, None, [(0, 0, 176, 1), (1, 0, 176, 1)]),
        # a window lowers the boundary, and the windows before it are asked again
        ([full(0, 16), group(1, "sliding_window", 16, window=32),
          group(2, "sliding_window", 16, window=16)], 0, 97,
         [(0, 0, 6, 6), (1, 0, 6, 6), (2, 0, 6, 3), (1, 0, 3, 3), (2, 0, 3, 3)],
         Exit.SERVED, None,
         [(0, 0, 96, 1), (1, 0, 96, 1), (2, 0, 48, 1), (1, 0, 48, 2), (2, 0, 48, 2)]),
    ],
)  # fmt: skip
def test_replay_tells_how_a_lookup_ended(groups, local, tokens, asked, exit_, veto, answers):
    replay = replay_queries(layout(*groups), local, tokens, None, asked)
    assert (replay.exit, replay.vetoing_group) == (exit_, veto)
    got = [(a.kv_group, a.popped, a.boundary, a.pass_number) for a in replay.answers]
    assert got == answers


def test_smallest_changes_that_serve_what_was_lost():
    every: Callable[[int, int], bool] = lambda _group, _chunk: True  # noqa: E731
    found = layout(full(0, 16), mamba(1, 64))
    assert search(found, every, 0, 81, drafters={0}, widen=False, load_window=False) == 0
    assert search(found, every, 0, 81, drafters={0}, widen=True, load_window=False) == 64
    assert search(found, every, 0, 81, drafters=(), widen=False, load_window=False) == 64
