from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvlens.dashboard.demo.process import Child, DemoError, Interrupted, Supervisor

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def start(supervisor: Supervisor, folder: Path, code: str) -> Child:
    return supervisor.start("a program", [sys.executable, "-c", code], folder / "log")


def wrote(child: Child) -> bool:
    return child.log.read_text() != ""


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody reaps counts as ended."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_whole_group_ends_with_the_supervisor(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        child = start(supervisor, tmp_path, FAMILY)
        child.wait_until(lambda: wrote(child), 30)
        grandchild = int(child.log.read_text())
        assert child.alive()
    assert not child.alive()
    assert gone(grandchild)


def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlens.dashboard.demo.process.GRACE_SECONDS", 0.2)
    with Supervisor() as supervisor:
        child = start(supervisor, tmp_path, STUBBORN)
        child.wait_until(lambda: wrote(child), 30)
        supervisor.stop(child)
        assert gone(child.pid)


def test_a_signal_ends_the_children_and_restores_the_handlers(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    children = []

    def interrupted() -> None:
        with Supervisor() as supervisor:
            children.append(start(supervisor, tmp_path, FAMILY))
            os.kill(os.getpid(), signal.SIGTERM)
            children[0].wait()

    with pytest.raises(Interrupted) as caught:
        interrupted()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert not children[0].alive()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_child_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('out of memory')"
    with Supervisor() as supervisor:
        child = start(supervisor, tmp_path, code)
        with pytest.raises(DemoError, match=r"(?s)exit code 1.*\n99\n.*out of memory") as caught:
            child.wait_until(lambda: False, 30)
    assert "\n50\n" not in str(caught.value)


def test_a_child_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        child = start(supervisor, tmp_path, FAMILY)
        with pytest.raises(DemoError, match="not ready after 0 s"):
            child.wait_until(lambda: False, 0)
