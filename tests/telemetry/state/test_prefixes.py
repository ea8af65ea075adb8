"""What an engine has computed before, by block hash."""

import hashlib

import msgspec
import pytest

from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.state.prefixes import KnownPrefixes


def layout(*groups):
    return Layout(
        groups=[
            GroupLayout(kv_group=i, group_kind=kind, tokens_per_block=size, tokens_per_chunk=size,
                        drafter=drafter)
            for i, (kind, size, drafter) in enumerate(groups)
        ],
        tokens_per_hash=16,
    )  # fmt: skip


FULL = layout(("full_attention", 16, False))
STATES = layout(("full_attention", 16, False), ("mamba", 64, False))
DRAFTER = layout(("full_attention", 16, True))
DRAFTER_STATES = layout(("full_attention", 16, True), ("mamba", 64, False))


def hashes(tokens, seed=1, diverge=None):
    """Block hashes, chained, of a prompt; from token ``diverge`` on it is another one."""
    made, last = [], b""
    for block in range(tokens // 16):
        own = seed if diverge is None or (block + 1) * 16 <= diverge else seed + 1
        last = hashlib.sha256(last + f"{own}/{block}".encode()).digest()
        made.append(last)
    return made


@pytest.mark.parametrize(
    ("groups", "first", "second", "expected"),
    [
        # The same prompt again.
        (FULL, (100, None), (100, None), 96),
        (FULL, (96, None), (96, None), 96),
        (STATES, (100, None), (100, None), 64),
        (STATES, (128, None), (128, None), 64),  # the last token is computed again
        (STATES, (129, None), (129, None), 128),
        (DRAFTER, (100, None), (100, None), 80),  # the sixth chunk is given up
        (DRAFTER_STATES, (81, None), (81, None), 64),  # F7
        (DRAFTER_STATES, (79, None), (79, None), 0),  # no chunk to give up beyond 64
        # A shared prefix: states are kept at the end of a prompt only.
        (FULL, (200, None), (200, 100), 96),
        (STATES, (200, None), (200, 100), 0),
        (STATES, (130, None), (200, None), 128),
        # Too short, or another prompt.
        (FULL, (15, None), (15, None), 0),
        (FULL, (100, 0), (100, None), 0),
    ],
)
def test_expected_tokens_of_a_second_prompt(groups, first, second, expected):
    known = KnownPrefixes(groups)
    known.computed(hashes(first[0], diverge=first[1]), first[0], first[0] + 8)
    kept, computed = known.expected(hashes(second[0], diverge=second[1]), 0, second[0])
    assert (kept, computed) == (expected, expected)


def test_local_tokens_are_not_expected_again():
    known = KnownPrefixes(FULL)
    known.computed(hashes(100), 100, 100)
    assert known.expected(hashes(100), 48, 100)[0] == 48
    assert known.expected(hashes(100), 96, 100)[0] == 0


def test_what_was_evicted_is_told_apart():
    known = KnownPrefixes(FULL)
    names = hashes(100)
    known.computed(names, 100, 100)
    known.evicted(names[2] + bytes(4))
    assert known.expected(names, 0, 100) == (32, 96)
    known.computed(names, 100, 100)
    assert known.expected(names, 0, 100) == (96, 96)
    known.reset()
    assert known.expected(names, 0, 100) == (0, 0)


def test_a_store_threshold_wants_more_than_one_computation():
    known = KnownPrefixes(FULL, computations=2)
    known.computed(hashes(100), 100, 100)
    assert known.expected(hashes(100), 0, 100)[0] == 0
    known.computed(hashes(100), 100, 100)
    assert known.expected(hashes(100), 0, 100)[0] == 96


def test_with_lookahead_hashes_nothing_is_given_up():
    group = msgspec.structs.replace(DRAFTER.groups[0], hash_lookahead=1)
    known = KnownPrefixes(msgspec.structs.replace(DRAFTER, groups=[group]))
    names = hashes(95)  # of 96 tokens the last block waits for its successor
    known.computed(names, 96, 96)
    assert known.expected(names, 0, 96)[0] == 80


def test_memory_is_bounded():
    known = KnownPrefixes(FULL, limit=100)
    for seed in range(50):
        known.computed(hashes(160, seed=seed * 2), 160, 160)
    assert known.expected(hashes(160, seed=98), 0, 160)[0] == 160
    assert known.expected(hashes(160, seed=0), 0, 160)[0] == 0
    assert len(known._times) == 100


@pytest.mark.parametrize("size", [16, 32, 128])
def test_tokens_per_hash_are_found_out(size):
    coarse = layout(("full_attention", 128, False))
    known = KnownPrefixes(coarse)
    count = 1290 // size
    names = [hashlib.sha256(f"{i}".encode()).digest() for i in range(count)]
    known.computed(names, 1290, 1290)
    assert known.expected(names, 0, 1290)[0] == 1280
