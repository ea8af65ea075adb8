from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import factory
import gallery
import msgspec
import pytest
from flown import fly

from kvlens.dashboard.cli import main
from kvlens.dashboard.flight import inspect
from kvlens.telemetry import records
from kvlens.telemetry.flight.format import MAGIC
from kvlens.telemetry.flight.recorder import Mode
from kvlens.telemetry.records import RequestRecord

WEB = {"fastapi", "httpx", "jinja2", "pydantic", "rich", "sse_starlette", "starlette", "uvicorn"}


def night(info: records.EngineInfo | None = None) -> list[RequestRecord]:
    """Two requests served, four lost."""
    return [
        factory.served_record(n, info) if n < 2 else factory.lost_record(n, info) for n in range(6)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fly(tmp_path / "rec", factory.engine(), night())
    return tmp_path / "rec"


@pytest.fixture
def nine_groups(tmp_path: Path) -> Path:
    info = gallery.nine_group_engine(factory.engine())
    record = gallery.gap_record(factory.lost_record(9, info), info.started_at + 30)
    return fly(
        tmp_path / "nine",
        info,
        [msgspec.structs.replace(record, incarnation_id=info.incarnation_id)],
    )


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_has_a_row_per_request_in_80_columns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, folder)
    rows = [line.split() for line in lines if "cmpl-" in line]
    assert [row[1:] for row in rows[:3]] == [
        ["cmpl-0000", "full", "1,024", "1,024", "0"],
        ["cmpl-0001", "full", "1,024", "1,024", "0"],
        ["cmpl-0002", "lost", "drafter_fallback", "0", "1,024", "1,024"],
    ]
    assert len(rows) == 6
    assert max(map(len, lines)) <= 80
    assert "6 of 6 records: 4 lost, 2 full" in lines
    assert "drafter groups: 0, 1, 2" in " ".join(" ".join(lines).split())
    assert "the engine shut down at" in lines[-1]
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--verdict", "full"], [0, 1]),
        (["--verdict", "full", "--verdict", "lost"], [0, 1, 2, 3, 4, 5]),
        (["--cause", "drafter_fallback"], [2, 3, 4, 5]),
        (["--cause", "capacity"], []),
        (["--since", "{14}"], [4, 5]),
        (["--until", "{11}"], [0, 1]),
        (["--since", "{12}", "--until", "{12}"], [2]),
    ],
)
def test_filters(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: list[int]
) -> None:
    after = [
        str(factory.START + float(word.strip("{}"))) if word.startswith("{") else word
        for word in arguments
    ]
    lines = shown(capsys, folder, "--json", *after)
    assert [json.loads(line)["request_id"] for line in lines] == [f"cmpl-{n:04d}" for n in ids]


def test_times_may_be_iso(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, folder, "--json", "--since", "2126-01-01T00:00:00Z") == []
    assert len(shown(capsys, folder, "--json", "--since", "2020-01-01T00:00:00")) == 6


def test_json_lines_are_the_whole_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, folder, "--json")
    assert [records.decode_record(line) for line in lines] == night()
    assert {json.loads(line)["in_flight"] for line in lines} == {False}


def test_a_request_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, folder, "--request", "cmpl-0003")
    text = "\n".join(lines)
    assert "verdict   lost, drafter_fallback (certain)" in lines
    assert "vetoed here: raw hits 1, after pop 0" in " ".join(text.split())
    assert "lookup=corrected" in text
    assert "  drafter_groups: [0,1,2]" in lines
    assert max(map(len, lines)) <= 80
    assert main(["inspect", str(folder), "--request", "cmpl-0003-0-inc-a1"]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_a_request_in_full_says_where_tokens_came_from_and_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = msgspec.structs.replace(
        factory.lost_record(0),
        computed_tokens=588,
        tier_tokens={"host": 448, "disk": 64},
        other_tokens=16,
        evicted_tokens=64,
        lost_gpu_seconds=0.25,
        ghost_chunks=2,
        ghost_distance=1200,
    )
    fly(tmp_path, factory.engine(), [record])
    text = " ".join(" ".join(shown(capsys, tmp_path, "--request", "cmpl-0000")).split())
    assert (
        "computed 588 of the prompt; loaded from host 448, disk 64; another connector loaded 16; "
        "evicted before 64"
    ) in text
    assert "cost 250 ms of device time to compute them again; 2 chunks had been in the tier" in text
    assert "engine node-a:0, tiny-hybrid-eagle, vLLM 0.29.0, lookup stock" in text


def test_the_strip_has_one_axis_and_shows_a_single_missing_chunk(
    nine_groups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = "chatcmpl-8f14e45fceea167a5a36dedd4bea2543"
    lines = shown(capsys, nine_groups, "--request", request)
    strips = {line[:1]: line[24:] for line in lines if line[1:2] == " " and "/" in line[:24]}
    assert list(strips) == list("012345678")
    assert {len(strip) for strip in strips.values()} == {55}
    assert strips["1"].count("x") == 1
    assert abs(strips["1"].index("x") - 9_000 * 55 // 16_384) <= 1
    assert strips["0"].startswith("▓" * 12 + "█" * 12)
    assert strips["8"].endswith("?")
    assert sum(line.lstrip().startswith("^ 3,584 local") for line in lines) == 1
    assert any(line.startswith("  x missing: asked for") for line in lines)


def test_the_strip_is_ascii_where_nothing_else_can_be_shown(nine_groups: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvlens.dashboard.cli",
            "inspect",
            str(nine_groups),
            "--request",
            "chatcmpl-8f14e45fceea167a5a36dedd4bea2543",
        ],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert run.stdout.isascii()
    assert b"============############++++++xooo" in run.stdout


def test_a_request_that_still_waits_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = factory.lost_record(0)
    fly(tmp_path, factory.engine(), [], [msgspec.structs.replace(waiting, verdict="stalled")])
    lines = shown(capsys, tmp_path)
    assert any("stalled*" in line for line in lines)
    assert "* still waiting for a deferred lookup at that time" in lines


def test_what_a_recording_lacks_is_said_and_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fly(tmp_path, factory.engine(), night(), mode=Mode.ANOMALIES)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr()
    assert "5 of 5 records" in said.out
    assert "(flight_recorder_mode anomalies): 1 unremarkable request." in said.out
    assert "ended without a shutdown" in said.out
    assert "a record that was not written to its end" in said.err


def test_text_from_outside_does_not_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = msgspec.structs.replace(
        factory.lost_record(0), request_id="a\x1b[2Jb", summary="\x1b]0;title\x07", next_step="\r"
    )
    fly(tmp_path, factory.engine(), [evil])
    for arguments in ([], ["--request", "a\x1b[2Jb"], ["--json"]):
        text = "".join(shown(capsys, tmp_path, *arguments))
        assert not any(char in text for char in "\x1b\x07\r")


def newer(path: Path) -> None:
    path.write_bytes(MAGIC + b"\x09\x00" + bytes(12))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "holds no recording"),
        (lambda path: path.write_bytes(b"no recording"), "not a kvlens flight-recorder file"),
        (newer, "format version 9"),
        (lambda path: path.touch(), "it is empty"),
        (lambda path: path.write_bytes(MAGIC + b"\x01\x00"), "cut off inside its header"),
        (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: Input/output error"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "replay"])
def test_bad_input_is_named_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, make: object, said: str
) -> None:
    assert callable(make)
    make(tmp_path / "x")
    assert main([command, str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvlens {command}: {tmp_path / 'x'}")
    assert said in error


def test_a_record_that_makes_no_sense_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fly(tmp_path, factory.engine(), [msgspec.structs.replace(factory.lost_record(0), verdict="?")])
    assert main(["inspect", str(tmp_path)]) == 2
    assert "verdict '?' is not known here" in capsys.readouterr().err


def test_an_unknown_request_or_time_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder), "--request", "nobody"]) == 2
    assert "no request 'nobody'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", str(folder), "--since", "yesterday"])
    assert exit_.value.code == 2
    assert "'yesterday' is no time" in capsys.readouterr().err


def test_a_closed_pager_is_no_error(folder: Path) -> None:
    code = "import sys; from kvlens.dashboard.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "inspect", "--json", *[str(folder)] * 1]
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, b"")


def test_it_needs_no_extra(folder: Path) -> None:
    code = f"""
import sys
absent = {sorted(WEB | {"pydantic_settings", "vllm", "torch", "numpy"})!r}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{{name}} is absent in this test", name=name)
sys.meta_path.insert(0, Absent())
from kvlens.dashboard.cli import main
codes = [main(["inspect", {str(folder)!r}]), main(["inspect", {str(folder)!r}, "--json"]),
         main(["inspect", {str(folder)!r}, "--request", "cmpl-0003"]),
         main(["replay", {str(folder)!r}])]
print(codes)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "[0, 0, 0, 2]", run.stderr[-2000:]
    assert "pip install 'kvlens[dashboard]'" in run.stderr


def test_an_id_is_found_as_the_table_cuts_it() -> None:
    record = factory.served_record(1)
    whole = record.internal_request_id
    cases = {whole: True, f"cm~{whole[-6:]}": True, f"~{whole[-6:]}": False, "cmpl~other": False}
    for given, found in cases.items():
        assert inspect.RecordFilter(request=given).matches(record) is found
