from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvlens.dashboard import cli
from kvlens.dashboard.cli import main
from kvlens.telemetry import __version__


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"kvlens {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["serve", "--port", "70000"]])
def test_bad_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: kvlens" in capsys.readouterr().err


def test_a_busy_port_says_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert main(["serve", "--port", port, "--store", str(tmp_path / "store.db")]) == 2
    message = capsys.readouterr().err
    assert port in message
    assert "--port" in message


def test_a_setting_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "read_token" in capsys.readouterr().err


def test_a_variable_that_is_nearly_a_setting_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_SCRAPPE", "http://vllm:8000")
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "kvlens serve: KVLENS_SCRAPPE is no setting and is ignored: did you mean KVLENS_SCRAPE?"
    )


def test_a_store_that_cannot_be_opened_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store.db").write_text("no database at all, but long enough to look at" * 100)
    assert main(["serve", "--port", "0", "--store", str(tmp_path / "store.db")]) == 2
    assert "store.db" in capsys.readouterr().err


def test_simulate_starts_again_with_fixed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM goes through sets of keys: only equal hashes make two runs equal."""
    started: list[tuple[str, list[str], str]] = []

    class Replaced(Exception):
        pass

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        started.append((path, command[1:], environment["PYTHONHASHSEED"]))
        raise Replaced

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(sys, "argv", ["kvlens", "simulate", "a.yaml"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/kvlens", "simulate", "a.yaml"])
    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced):
        main()
    assert started == [(sys.executable, ["/bin/kvlens", "simulate", "a.yaml"], "0")]


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(options: object) -> int:
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr(cli.doctor, "run", absent)
    assert main(["doctor", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert "httpx" in said
    assert "pip install 'kvlens[dashboard]'" in said


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    script = (
        "import sys; from kvlens.dashboard import cli\n"
        "cli.replay.run = lambda options: [print('line') for _ in range(100_000)] and 0\n"
        f"sys.exit(cli.main(['replay', {str(tmp_path)!r}]))"
    )
    run = subprocess.run(
        f"{sys.executable} -c {shlex.quote(script)} | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "line\n", "")
