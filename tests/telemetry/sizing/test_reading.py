"""Traces in every format and packing, whole and broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.trace import TraceError

MOONCAKE = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
QWEN: dict[str, Any] = {
    "chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 5,
    "type": "text", "turn": 1, "hash_ids": [3, 3, 4],
}  # fmt: skip
EXPORT: dict[str, Any] = {
    "request_id": "a", "internal_request_id": "a", "engine_id": "e", "incarnation_id": "one",
    "model": "m", "arrival_time": 1.0, "finish_time": 2.0, "prompt_tokens": 200,
    "verdict": "cold", "prefix_blocks": [[0, 2]], "prefix_block_tokens": 64,
}  # fmt: skip


def lines(*rows: Any) -> bytes:
    return b"".join(
        (row if isinstance(row, str) else json.dumps(row)).encode() + b"\n" for row in rows
    )


def written(folder: Path, body: bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(body)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_plain_and_packed(tmp_path: Path, pack: Any) -> None:
    path = written(tmp_path, pack(lines(MOONCAKE, MOONCAKE | {"timestamp": 2500})))
    trace = Trace(path)
    requests = list(trace)
    assert (trace.format, trace.block_tokens, trace.chained_here) == ("mooncake", 512, False)
    assert [(one.time, one.tokens, list(one.ids)) for one in requests] == [
        (1.0, 600, [7, 8]),
        (2.5, 600, [7, 8]),
    ]


def test_several_packed_members_are_one_trace(tmp_path: Path) -> None:
    for pack in (gzip.compress, zstandard.compress):
        body = pack(lines(MOONCAKE)) + pack(lines(MOONCAKE))
        assert len(list(Trace(written(tmp_path, body)))) == 2


def test_qwens_ids_are_chained_and_sessions_followed(tmp_path: Path) -> None:
    second = QWEN | {"chat_id": 9, "parent_chat_id": 1, "timestamp": 2, "hash_ids": [3, 4, 4]}
    trace = Trace(written(tmp_path, lines(QWEN, second)))
    first, next_one = list(trace)
    assert (trace.format, trace.block_tokens, trace.chained_here) == ("qwen-bailian", 16, True)
    assert list(first.ids) == [0, 1, 2]  # one block twice: two prefixes
    assert list(next_one.ids) == [0, 3, 4]
    assert first.session == next_one.session == 1


def test_an_export_is_put_in_order(tmp_path: Path) -> None:
    later = EXPORT | {"finish_time": 3.0, "prefix_blocks": [[0, 0], [3, 4]]}
    other = EXPORT | {"finish_time": 1.0, "incarnation_id": "two"}
    short = EXPORT | {"prefix_blocks": [], "prompt_tokens": 12}
    trace = Trace(written(tmp_path, lines(later, short, EXPORT, other)))
    requests = list(trace)
    assert (trace.format, trace.block_tokens, trace.engines) == ("export", 64, 2)
    assert [len(one.ids) for one in requests] == [3, 3, 3]
    assert [one.engine for one in requests] == [1, 0, 0]
    assert requests[2].ids[0] == requests[1].ids[0]
    assert not set(requests[0].ids) & set(requests[1].ids)
    assert "1 requests name no block" in trace.notes[0]


def test_block_tokens_override_the_format(tmp_path: Path) -> None:
    path = written(tmp_path, lines(MOONCAKE | {"input_length": 30}))
    assert Trace(path, 16).block_tokens == 16
    assert len(list(Trace(path, 16))) == 1


WRONG: dict[str, tuple[Any, str]] = {
    "type": (MOONCAKE | {"input_length": "600"}, "2: input_length: expected int, got str; allowed"),
    "negative": (MOONCAKE | {"output_length": -1}, "2: output_length: expected int >= 0; allowed"),
    "negative id": (MOONCAKE | {"hash_ids": [7, -8]}, "2: hash_ids: expected int >= 0; allowed"),
    "huge id": (MOONCAKE | {"hash_ids": [7, 2**64]}, "2: hash_ids: "),
    "immense id": (MOONCAKE | {"hash_ids": [7, 10**40]}, "2: hash_ids: "),
    "fraction": (MOONCAKE | {"hash_ids": [7, 8.5]}, "2: hash_ids: expected int, got float"),
    "no list": (MOONCAKE | {"hash_ids": None}, "2: hash_ids: expected array, got null; allowed"),
    "huge": (MOONCAKE | {"input_length": 10**12}, "2: input_length: "),
    "time": (MOONCAKE | {"timestamp": 10}, "2: timestamp: 0.01 s after 1 s, time goes back"),
    "time type": (MOONCAKE | {"timestamp": "now"}, "2: timestamp: expected float, got str"),
    "count": (MOONCAKE | {"input_length": 1600}, "2: hash_ids: 2 ids for 1,600 tokens"),
    "too many": (MOONCAKE | {"hash_ids": [7, 8, 9]}, "2: hash_ids: 3 ids for 600 tokens"),
    "missing": ({"timestamp": 2000, "input_length": 600}, "2: output_length: object missing"),
    "not JSON": ('{"timestamp": 1000,', "2: not valid JSON: "),
    "no object": ("[1, 2]", "2: expected object, got array"),
    "mixed": (QWEN, "2: mixed formats: this line is qwen-bailian, the lines before are mooncake"),
    "mixed export": (EXPORT, "2: mixed formats: this line is export, "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named_with_its_field_and_what_is_allowed(
    tmp_path: Path, name: str
) -> None:
    row, said = WRONG[name]
    path = written(tmp_path, lines(MOONCAKE, row))
    with pytest.raises(TraceError) as error:
        list(Trace(path))
    assert str(error.value).startswith(f"{path}:{said}"), error.value
    if name not in ("not JSON", "no object"):
        assert "allowed: " in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (QWEN, MOONCAKE | {"timestamp": 5000}, "this line is mooncake, the lines before are qwen"),
        (EXPORT, MOONCAKE, "this line is mooncake, the lines before are export"),
        (QWEN, EXPORT, "this line is export, the lines before are qwen"),
    ],
)
def test_mixed_formats(tmp_path: Path, first: Any, second: Any, said: str) -> None:
    with pytest.raises(TraceError, match=f":2: mixed formats: {said}"):
        list(Trace(written(tmp_path, lines(first, second))))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("left", [0.1, 0.5, 0.99])
def test_a_cut_off_file_is_never_taken_for_a_whole_one(
    tmp_path: Path, pack: Any, left: float
) -> None:
    rows = [MOONCAKE | {"timestamp": n * 977, "hash_ids": [n * n, n**3]} for n in range(3000)]
    body = pack(lines(*rows))
    path = written(tmp_path, body[: int(len(body) * left)])
    with pytest.raises(TraceError, match="cut off") as error:
        list(Trace(path))
    assert str(path) in str(error.value)


def test_damaged_packing(tmp_path: Path) -> None:
    body = bytearray(gzip.compress(lines(*[MOONCAKE] * 500)))
    body[40] ^= 0xFF
    with pytest.raises(TraceError, match="gzip"):
        list(Trace(written(tmp_path, bytes(body))))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "holds no request"),
        (b"\n \n", "holds no request"),
        (b"\x00\x01\x02", "binary data"),
        (b"hello\n", "1: not valid JSON"),
        (b'{"prompt": "x"}\n', "1: unknown format with prompt; allowed: mooncake"),
        (lines(EXPORT | {"prefix_blocks": []}), "no request names its blocks"),
        (lines(EXPORT | {"prefix_blocks": [[5, 2]]}), "1: prefix_blocks: "),
        (lines(EXPORT | {"prefix_blocks": [[0, 90]]}), "1: prefix_blocks: "),
    ],
)
def test_what_is_no_trace(tmp_path: Path, body: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(Trace(written(tmp_path, body)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file"):
        list(Trace(tmp_path / "none.jsonl"))
