"""The import contract in pyproject.toml holds, and it fails for each kind of breach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("connector", "telemetry", "dashboard")
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]

pytestmark = pytest.mark.skipif(
    find_spec("importlinter") is None, reason="import-linter is in .venv only"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The three packages under their names, as `make lint` shows them to import-linter."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            tmp_path / "kvlens" / package,
            ignore=lambda folder, names: [
                name
                for name in names
                if not name.endswith(".py") and not (Path(folder) / name).is_dir()
            ],
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> tuple[int, str]:
    command = [*LINT, "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout + run.stderr


def test_the_contract_holds_for_every_file(copy: Path) -> None:
    code, told = lint(copy)
    assert code == 0, told
    files = sum(1 for _ in (copy / "kvlens").rglob("*.py"))
    assert f"Analyzed {files} files" in told
    assert "Contracts: 4 kept, 0 broken" in told


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("dashboard/model/query.py", "from kvlens.dashboard.store import base", "rooms"),
        ("dashboard/view/words.py", "from kvlens.dashboard.web import bars", "rooms"),
        ("dashboard/scrape/page.py", "from kvlens.dashboard.store import codec", "rooms"),
        ("dashboard/store/codec.py", "from kvlens.dashboard.store import sqlite", "cycles"),
        ("dashboard/demo/layers.py", "import kvlens.dashboard.demo.model", "cycles"),
        ("telemetry/facts.py", "from kvlens.telemetry import recorder", "cycles"),
        ("telemetry/state/reuse.py", "from kvlens.telemetry.verdict import advice", "floors"),
        ("connector/logs.py", "from kvlens.connector import offloading", "cycles"),
        ("telemetry/semconv.py", "from kvlens.dashboard import settings", "packages"),
        ("connector/logs.py", "from kvlens.dashboard.model import query", "packages"),
        ("dashboard/model/query.py", "from kvlens.connector import versions", "packages"),
        ("dashboard/annex/__init__.py", "", "rooms"),
    ],
)
def test_a_breach_is_told(copy: Path, file: str, line: str, broken: str) -> None:
    path = copy / "kvlens" / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as added:
        added.write(f"\n{line}\n")
    names = {
        "packages": "connector and dashboard know telemetry",
        "rooms": "each knows only those below it",
        "floors": "the way from a fact to what is told of it",
        "cycles": "no folders and no files import each other",
    }
    code, told = lint(copy)
    assert code == 1, told
    verdicts = [text for text in told.splitlines() if names[broken] in text]
    assert " BROKEN" in verdicts[0]
