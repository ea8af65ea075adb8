"""``kvlens size`` as one runs it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvlens.dashboard.cli import main

ROOT = Path(__file__).resolve().parents[3]
PART = ROOT / "tests" / "traces" / "conversation-2000.jsonl.gz"
LAYOUT = """
layout:
  groups:
    - {kind: full_attention, tokens_per_block: 64, bytes_per_block: 1048576}
    - {kind: mamba, tokens_per_block: 512, bytes_per_block: 4194304}
"""


def sized(folder: Path, *arguments: str, file: Path = PART) -> dict:  # type: ignore[type-arg]
    out = folder / "out.json"
    assert main(["size", str(file), "--json", str(out), *arguments]) == 0
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_json_has_the_documented_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sized(tmp_path, "--blocks", "1000,10000")
    assert said["requests"] == 2000
    assert said["format"] == "mooncake"
    assert [point["blocks"] for point in said["curve"]] == [1000, 10000]
    for point in said["curve"]:
        assert 0 < point["block_ratio"] < said["ceiling"] < 1
        assert 0 < point["token_ratio"] <= said["ceiling_tokens"]
    assert said["distinct_blocks"] < said["blocks"]
    shown = capsys.readouterr().out
    assert f"{said['curve'][0]['block_ratio']:.2%}" in shown
    assert "95% of what a tier can add" in shown
    assert "An ideal" in shown


def test_sizes_are_told_in_gib(tmp_path: Path) -> None:
    said = sized(tmp_path, "--blocks", "1024", "--bytes-per-token", "65536")
    assert said["curve"][0]["gib"] == 1024 * 512 * 65536 / 2**30
    assert said["curve"][0]["chunks"] is None


def test_a_layout_gives_slots_and_gib(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    said = sized(tmp_path, "--blocks", "1024", "--layout", str(layout))
    point = said["curve"][0]
    assert point["chunks"] == 1024 * (512 // 64 + 1)
    assert point["gib"] == 1024 * (8 * 2**20 + 4 * 2**20) / 2**30
    assert "12 GiB" in capsys.readouterr().out
    layout.write_text(LAYOUT.replace(", bytes_per_block: 1048576", ""))
    assert main(["size", str(PART), "--layout", str(layout)]) == 2
    assert "bytes_per_block is given for some groups" in capsys.readouterr().err


def test_engines_and_gpu_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sized(tmp_path, "--engines", "3", "--routing", "session-sticky", "--gpu-tokens", "51200")
    assert (said["engines"], said["routing"], said["gpu"]["blocks"]) == (3, "session-sticky", 100)
    assert all(point["blocks"] > 100 for point in said["curve"])
    assert said["curve"][-1]["tier_token_ratio"] == pytest.approx(
        said["ceiling_tokens"] - said["gpu"]["token_ratio"]
    )
    assert "3 engines, session-sticky routing" in capsys.readouterr().out


def test_the_order_of_touches_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sized(tmp_path, "--order", "last-to-first", "--blocks", "3000")
    assert said["order"] == "last-to-first"
    assert "from the last to the first, as vLLM does" in capsys.readouterr().out
    assert said["curve"][0] != sized(tmp_path, "--blocks", "3000")["curve"][0]


def test_the_picture_is_one_file(tmp_path: Path) -> None:
    picture = tmp_path / "out.html"
    name = tmp_path / "<b>&.jsonl"
    name.write_bytes(gzip.decompress(PART.read_bytes()))
    said = sized(tmp_path, "--html", str(picture), "--bytes-per-token", "65536", file=name)
    html = picture.read_text()
    assert "<b>&.jsonl" not in html
    assert "&lt;b&gt;&amp;.jsonl" in html
    assert "http" not in html.replace("<!doctype html>", "")
    assert "light-dark(" in html
    assert f"{100 * said['ceiling_tokens']:.1f}\N{NO-BREAK SPACE}%" in html
    for svg in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")


def test_nothing_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[0]}\n')
    said = sized(tmp_path, "--html", str(tmp_path / "o.html"), file=trace)
    assert (said["ceiling"], said["requests"]) == (0, 1)
    assert "a tier can add nothing" in capsys.readouterr().out


def test_a_broken_trace_leaves_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(PART.read_bytes()[:50_000])
    assert main(["size", str(cut), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"kvlens size: {cut}: cut off")
    assert not (tmp_path / "out.json").exists()
    assert main(["size", str(PART), "--json", str(tmp_path / "none" / "out.json")]) == 2
    assert "cannot be written there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--blocks", "0"], ["--blocks", "a"], ["--bytes-per-token", "-1"], ["--engines", "0"]],
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["size", str(PART), *wrong])
    assert stopped.value.code == 2
