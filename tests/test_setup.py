"""The set-up script, without installing anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MISFITS = {"torchvision", "torchaudio", "torchcodec", "triton"}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on an empty checkout."""
    spec = importlib.util.spec_from_file_location("kvlens_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.syspath_prepend(ROOT / "scripts")  # where a script finds its neighbours
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "engine.txt").write_text("torch==1.0+cpu\n")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def finish(environment: Any) -> None:
    """Leave an environment as a finished build does."""
    python = environment.path / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    environment.stamp.write_text(f"{environment.packages}\n{environment.project}\n")


def test_a_finished_environment_is_reused(setup: ModuleType) -> None:
    environment = setup.Environment(".venv", ("engine",))
    assert environment.state() == (False, False)
    finish(environment)
    assert environment.state() == (True, True)


def test_an_interrupted_one_is_not(setup: ModuleType) -> None:
    environment = setup.Environment(".venv", ("engine",))
    finish(environment)
    environment.stamp.unlink()
    assert environment.state() == (False, False)


def test_a_changed_lock_or_project_is_noticed(setup: ModuleType, tmp_path: Path) -> None:
    finish(setup.Environment(".venv", ("engine",)))
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert setup.Environment(".venv", ("engine",)).state() == (True, False)
    (tmp_path / "requirements" / "engine.txt").write_text("torch==2.0+cpu\n")
    assert setup.Environment(".venv", ("engine",)).state() == (False, False)


def test_torch_comes_from_the_cpu_index_where_pip_has_none(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0 if setup.CPU_TORCH_INDEX in command else 1)

    monkeypatch.setattr(setup.subprocess, "run", run)
    setup.Environment(".venv", ("engine",))._install_torch()
    assert [command[-1] for command in calls] == ["torch==1.0+cpu", setup.CPU_TORCH_INDEX]
    assert all("--no-deps" in command for command in calls)


def test_a_python_that_is_too_old_or_new_is_refused(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 3 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("KVLENS_PYTHON", str(fake))
    with pytest.raises(setup.SetupError, match=r"3\.11 to 3\.13.*: 3\.9"):
        setup.find_python()
    monkeypatch.setenv("KVLENS_PYTHON", sys.executable)
    assert setup.find_python() == sys.executable


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locks_are_exact_and_hold_nothing_that_does_not_fit(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0] for line in lines]
    assert all(re.match(r"[\w.-]+==[\w.+!]+( ; .+)?$", line) for line in lines)
    assert len(names) == len(set(names))
    assert not MISFITS & set(names)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", "deb http://mirror.example/debian bookworm main\n"),
        ("sources.list", "deb [signed-by=/k.gpg] http://mirror.example/debian/ bookworm main\n"),
        ("sources.list.d/debian.sources", "Types: deb\nURIs: http://mirror.example/debian\n"),
    ],
)
def test_the_mirror_of_this_machine_is_found(
    name: str, text: str, setup: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "etc" / name
    path.parent.mkdir(parents=True)
    assert setup.newer_prometheus.mirror(tmp_path / "etc") is None
    path.write_text("# other\ndeb http://security.example/debian-security x main\n" + text)
    assert setup.newer_prometheus.mirror(tmp_path / "etc") == "http://mirror.example/debian"
