"""No part of kvlens needs what only another part needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
WEB = {"fastapi", "httpx", "jinja2", "pydantic", "rich", "sse_starlette", "starlette", "uvicorn"}
ENGINE = {"numpy", "torch", "vllm"}
IMPORT_ALL = """
import importlib, pkgutil, sys

absent = sys.argv[2].split(",")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in absent):
            raise ModuleNotFoundError(f"{name} is absent in this test", name=name)

sys.meta_path.insert(0, Absent())
package = importlib.import_module(sys.argv[1])
modules = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
print(sum(1 for module in modules if importlib.import_module(module.name)))
"""


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        ("kvlens.telemetry", {*WEB, *ENGINE, "kvlens.dashboard", "kvlens.connector"}),
        ("kvlens.dashboard", {*ENGINE, "kvlens.connector"}),
    ],
)
def test_every_module_imports_without_the_extras_of_others(package: str, absent: set[str]) -> None:
    command = [sys.executable, "-c", IMPORT_ALL, package, ",".join(absent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 3


def test_the_connector_imports_no_web_framework_and_no_dashboard() -> None:
    # Read, not run: vLLM itself brings FastAPI and Jinja into the process.
    forbidden = {*WEB, "kvlens.dashboard"}
    files = list(source_folder("kvlens.connector").rglob("*.py"))
    assert files
    for file in files:
        for name in imported_names(file):
            assert not any(name == one or name.startswith(one + ".") for one in forbidden), (
                f"{file.name} imports {name}"
            )


def test_the_command_starts_without_any_extra() -> None:
    absent = {*WEB, *ENGINE, "kvlens.connector"}
    code = IMPORT_ALL.partition("package = ")[0] + (
        "from kvlens.dashboard.cli import main\nmain(['--version'])"
    )
    command = [sys.executable, "-c", code, "", ",".join(absent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("kvlens "), run.stderr[-2000:]


def source_folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_every_package_is_in_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {
        "kvlens." + ".".join(init.parent.relative_to(ROOT).parts)
        for package in ("connector", "telemetry", "dashboard")
        for init in (ROOT / package).rglob("__init__.py")
    }
    elsewhere = {f"kvlens.dashboard.shipped.{name}" for name in ("rules", "boards", "runbooks")}
    assert listed == found | elsewhere
