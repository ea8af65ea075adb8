"""Numbers for blocks: equal prefixes, equal numbers, and nothing else to be read from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from flights import record, recorder
from recording import layout

from kvlens.telemetry.sizing.measure import Question, measure
from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.trace import TraceError
from kvlens.telemetry.state.numbering import MAX_RANGES, Numbering


def keys(*tokens: int) -> list[bytes]:
    """Offload keys of chunks: each hash covers all chunks before it."""
    made, before = [], b""
    for token in tokens:
        before = hashlib.sha256(before + token.to_bytes(4, "big")).digest()
        made.append(before + bytes(4))
    return made


def numbered(numbering: Numbering, prompt: list[bytes]) -> list[tuple[int, int]]:
    return numbering.blocks(prompt, len(prompt), 16 * len(prompt))


def test_a_block_is_whole_chunks_of_the_finest_group_that_is_kept_whole() -> None:
    numbering = Numbering(layout())
    assert (numbering.group, numbering.block_tokens) == (0, 64)
    assert numbered(numbering, keys(*range(11))) == [(0, 1)]  # 11 chunks of 16: two blocks of 64
    assert numbering.blocks(keys(*range(8)), 8, 127) == [(0, 0)]  # and only of the prompt


def test_equal_prefixes_have_equal_numbers() -> None:
    numbering = Numbering(layout())
    assert numbered(numbering, keys(*range(12))) == [(0, 2)]
    assert numbered(numbering, keys(*range(8), 90, 91, 92, 93)) == [(0, 1), (3, 3)]
    assert numbered(numbering, keys(*range(12), 4, 5, 6, 7)) == [(0, 2), (4, 4)]
    assert numbered(numbering, keys(77, *range(1, 8))) == [(5, 6)]


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    numbering = Numbering(layout(), limit=4)
    assert numbered(numbering, keys(*range(16))) == [(0, 3)]
    assert numbered(numbering, keys(70, 71, 72, 73)) == [(4, 4)]
    assert numbered(numbering, keys(*range(12))) == [(0, 2)]  # its start is still known
    assert numbered(numbering, keys(*range(16))) == [(0, 2), (5, 5)]


def test_a_prompt_in_very_many_pieces_is_cut() -> None:
    numbering = Numbering(layout())
    prompt: list[int] = []
    for turn in range(MAX_RANGES + 20):
        prompt += range(4 * turn, 4 * turn + 4)
        ranges = numbered(numbering, keys(*prompt))
        numbered(numbering, keys(10**6 + turn, 1, 2, 3))
    assert len(ranges) == MAX_RANGES


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    written = recorder(tmp_path)
    for one in (
        record(0, prompt_tokens=200, prefix_blocks=[(0, 2)], prefix_block_tokens=64),
        record(1, prompt_tokens=300, prefix_blocks=[(0, 1), (3, 4)], prefix_block_tokens=64),
        record(2, prompt_tokens=20, prefix_block_tokens=64),
    ):
        written.request(one)
    written.close()
    (path,) = tmp_path.glob("*.kvlens")
    trace = Trace(path)
    said = measure(trace, lambda: trace.block_tokens, Question())
    assert (trace.format, trace.block_tokens) == ("flight-recording", 64)
    assert (said.requests, said.blocks, said.distinct_blocks) == (2, 7, 5)
    assert said.ceiling.block_ratio == pytest.approx(2 / 7)
    assert said.ceiling.token_ratio == pytest.approx(128 / 500)
    with pytest.raises(TraceError, match="a recording says itself"):
        list(Trace(path, 16))
