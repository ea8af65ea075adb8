"""The oracle against a scan over every boundary, on random layouts and residency."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import cases, group, layout

from kvlens.telemetry.verdict.oracle import Holds, is_servable, servable_boundary


@settings(max_examples=800, deadline=None)
@given(cases())
def test_largest_boundary_of_a_naive_scan(case):
    found, missing, local, tokens, cap = case
    asked: Counter[tuple[int, int]] = Counter()

    def holds(kv_group: int, chunk: int) -> bool:
        size = found.by_group()[kv_group].tokens_per_chunk
        assert 0 <= chunk < tokens // size, "asked for a chunk that does not exist"
        asked[kv_group, chunk] += 1
        return (kv_group, chunk) not in missing

    got = servable_boundary(found, holds, local, tokens, cap=cap)
    assert max(asked.values(), default=0) <= 1
    naive = [b for b in range(local + 1, tokens + 1)
             if is_servable(found, holds, local, tokens, b, cap)]  # fmt: skip
    assert got == max(naive, default=local)


def all_but(*missing: tuple[int, int]) -> Holds:
    return lambda kv_group, chunk: (kv_group, chunk) not in missing


@pytest.mark.parametrize(
    ("groups_", "holds", "local", "tokens", "boundary"),
    [
        ([group(0, "full_attention", 16)], all_but(), 0, 64, 64),
        ([group(0, "full_attention", 16, drafter=True)], all_but(), 0, 64, 48),
        ([group(0, "full_attention", 16, drafter=True)], all_but((0, 2)), 0, 64, 16),
        ([group(0, "sliding_window", 16, window=17)], all_but((0, 0)), 0, 65, 64),
        ([group(0, "sliding_window", 16, window=17)], all_but((0, 3)), 0, 65, 48),
        ([group(0, "chunked_local", 16, attention_chunk=64)], all_but((0, 5)), 0, 100, 80),
        ([group(0, "chunked_local", 16, attention_chunk=64)], all_but((0, 4)), 0, 100, 64),
        ([group(0, "mamba", 2112)], all_but(), 0, 5 * 2112, 4 * 2112),  # N2
        # F13: attention to token 176, states of 64 tokens
        ([group(0, "full_attention", 16), group(1, "mamba", 64)], all_but((0, 11)), 0, 300, 128),
        # F7
        ([group(0, "full_attention", 16, drafter=True), group(1, "mamba", 64)],
         all_but(), 0, 81, 64),
        # F20: the drafter group has no chunk to pop beyond 7,168
        ([group(0, "full_attention", 3584), group(1, "full_attention", 4),
          *[group(i, "mamba", 3584) for i in range(2, 6)],
          group(6, "sliding_window", 64, window=64, drafter=True)], all_but(), 0, 7178, 3584),
        # F6
        ([group(0, "full_attention", 12288), group(1, "mamba", 1536)], all_but(), 0, 10000, 0),
        ([group(0, "full_attention", 12288), group(1, "mamba", 1536)], all_but(), 0, 13000, 12288),
        # N9: a remainder of less than a chunk is servable by definition
        ([group(0, "full_attention", 512)], all_but(), 1008, 1100, 1024),
    ],
)  # fmt: skip
def test_cases_from_the_field(groups_, holds, local, tokens, boundary):
    assert servable_boundary(layout(*groups_), holds, local, tokens) == boundary


def test_lookups_grow_with_the_number_of_chunks_and_no_faster():
    found = layout(
        group(0, "full_attention", 16, drafter=True),
        group(1, "sliding_window", 16, window=1024),
        group(2, "mamba", 64),
    )
    for chunks in (1024, 4096):
        asked = 0

        def holds(kv_group: int, chunk: int) -> bool:
            nonlocal asked
            asked += 1
            # every window is broken, and no state is kept
            return kv_group == 0 or (kv_group == 1 and chunk % 63 != 0)

        assert servable_boundary(found, holds, 0, chunks * 16 + 1) == 0
        assert asked <= chunks * 2 + chunks // 4 + 2


def test_kind_that_is_not_known_needs_the_whole_prefix():
    found = layout(group(0, "sink_full_attention", 16))
    assert servable_boundary(found, all_but((0, 1)), 0, 64) == 16


PARTIAL = layout(group(0, "full_attention", 8), group(1, "mamba", 8), partial_tail=True)


@settings(max_examples=200, deadline=None)
@given(
    missing=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=4),
    tails=st.sets(st.tuples(st.integers(0, 1), st.integers(1, 40)), max_size=60),
    prompt=st.integers(1, 40),
    local=st.integers(0, 20),
    cap=st.none() | st.integers(0, 40),
)
def test_partial_tail_is_the_largest_by_definition(missing, tails, prompt, local, cap):
    holds = all_but(*missing)
    plain = servable_boundary(PARTIAL, holds, local, prompt, cap=cap)
    got = servable_boundary(
        PARTIAL, holds, local, prompt, prompt, cap, lambda g, b: (g, b) in tails
    )
    naive = [
        b
        for b in range(local + 1, min(prompt - 1, local + (prompt if cap is None else cap)) + 1)
        if all((0, k) not in missing for k in range(local // 8, b // 8))
        and {(0, b), (1, b)} <= tails
    ]
    assert got == max([plain, *naive])
    assert PARTIAL.groups[1].recurrent
