"""Lay out every supported vLLM beyond the two environments, and run tests on each.

Usage: python scripts/engines.py [--lock | --test [PYTEST ARGUMENT ...]]

An engine in `.engines/VERSION` is an interpreter that sees that release's wheel first
and everything else in `.venv`: pytest, torch, kvlens. Its wheel is checked against
`requirements/engines.lock`; `--lock` adds what is missing there. A stamp, written last,
says what an engine holds, so an interrupted run is repeated and a finished one costs
nothing. Engines that never serve keep no compiled code, which is most of a wheel.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = runpy.run_path(str(ROOT / "connector" / "versions.py"))
LOCK = ROOT / "requirements" / "engines.lock"
NEWEST = ROOT / ".venv"
NOT_COLLECTED = 5
"""pytest's exit code when the arguments select nothing."""
AT_ONCE = 2
"""Engines tested at the same time: each needs a core and about 1 GiB."""
MAX_DATA_BYTES = 2_000_000
"""Larger files of a wheel are programs and tables that no scheduler test reads."""


class EngineError(Exception):
    """An engine cannot be laid out; the message names what to change."""


def python_of(folder: Path) -> Path:
    """Interpreter of a virtual environment."""
    return folder / "bin" / "python"


class Layer:
    """One engine laid over the newest environment."""

    def __init__(self, engine: Any, locked: bool = True) -> None:
        """Without ``locked`` any wheel of that version will do: nobody has added it yet."""
        self.locked = locked
        self.requirement = f"{engine.package}=={engine.version}"
        self.serves = engine.level is VERSIONS["Level"].SERVER
        self.path: Path = ROOT / engine.folder
        self.stamp = self.path / "kvlens-engine"

    def wanted(self) -> str:
        """What the stamp says once this engine is laid out; raises without a locked hash."""
        lines = LOCK.read_text().splitlines() if LOCK.is_file() else []
        for line in lines if self.locked else [f"{self.requirement} "]:
            if line.startswith(f"{self.requirement} "):
                made_by = Path(__file__).read_bytes() + (NEWEST / "pyvenv.cfg").read_bytes()
                code = hashlib.sha256(made_by).hexdigest()
                return f"{line}\nserves: {self.serves}\nby: {code}\n"
        raise EngineError(
            f"{LOCK.name} has no hash of {self.requirement}: run `python scripts/engines.py --lock`"
        )

    def ready(self) -> bool:
        """Whether it is laid out as wanted."""
        return self.stamp.is_file() and self.stamp.read_text() == self.wanted()

    def build(self) -> None:
        """Lay it out, unless it is there."""
        if self.ready():
            return
        say(f"laying out {self.path.name} ({self.requirement})")
        shutil.rmtree(self.path, ignore_errors=True)
        call([python_of(NEWEST), "-m", "venv", "--without-pip", self.path])
        packages = next(self.path.glob("lib/python*/site-packages"))
        shared = next(NEWEST.glob("lib/python*/site-packages"))
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            unpack(fetch(self.wanted().splitlines()[0], Path(folder)), packages, self.serves)
        # addsitedir, not the bare path: kvlens itself is found through a .pth file there.
        (packages / "kvlens-shared.pth").write_text(
            f"import site; site.addsitedir({str(shared)!r})"
        )
        self.stamp.write_text(self.wanted())


def fetch(requirement: str, folder: Path) -> Path:
    """Download one wheel, checked if ``requirement`` carries a hash."""
    line = folder / "requirement.txt"
    line.write_text(requirement + "\n")
    call(
        [
            *(python_of(NEWEST), "-m", "pip", "download", "-qq", "--no-input", "--no-deps"),
            *("--disable-pip-version-check", "--only-binary", ":all:", "-d", folder, "-r", line),
        ]
    )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, packages: Path, compiled: bool) -> None:
    """Unpack a wheel; without ``compiled`` only what an import of its Python code needs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            packages,
            [
                item.filename
                for item in archive.infolist()
                if compiled or (".so" not in item.filename and item.file_size <= MAX_DATA_BYTES)
            ],
        )


def lay_out(layers: list[Layer]) -> None:
    """Build all layers; returns at once if they are there."""
    if not python_of(NEWEST).exists():
        raise EngineError(f"{NEWEST} is not there: run `make environments` first")
    if all(layer.ready() for layer in layers):
        return
    lock = ROOT / ".build" / "engines.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as handle, ThreadPoolExecutor(AT_ONCE) as pool:
        fcntl.flock(handle, fcntl.LOCK_EX)
        list(pool.map(Layer.build, layers))
    size = sum(f.stat().st_size for layer in layers for f in layer.path.rglob("*") if f.is_file())
    say(f"{len(layers)} engines in {layers[0].path.parent}: {size / 1e6:.0f} MB")


def write_lock(layers: list[Layer]) -> None:
    """Add the hashes that are missing, and drop the lines of engines that are gone."""
    lines = LOCK.read_text().splitlines() if LOCK.is_file() else []
    kept = [line for line in lines if line.startswith("#")]
    for layer in layers:
        line = next((li for li in lines if li.startswith(f"{layer.requirement} ")), None)
        if line is None:
            with tempfile.TemporaryDirectory() as folder:
                wheel = fetch(layer.requirement, Path(folder)).read_bytes()
            line = f"{layer.requirement} --hash=sha256:{hashlib.sha256(wheel).hexdigest()}"
            say(f"locked {line}")
        kept.append(line)
    LOCK.write_text("\n".join(kept) + "\n")


def test(engines: list[Any], arguments: list[str]) -> int:
    """Run the connector's tests on every engine but the newest; 1 if any fails."""

    def run(engine: Any) -> int:
        command = [python_of(ROOT / engine.folder), "-m", "pytest", "--connector-only", "-q"]
        command += ["-p", "no:cacheprovider", *arguments]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        failed = ran.returncode not in (0, NOT_COLLECTED)
        lines = (ran.stdout + ran.stderr).splitlines()
        print(f"vLLM {engine.version}: " + "\n".join(lines if failed else lines[-1:]), flush=True)
        return int(failed)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return max(pool.map(run, engines))


def call(command: list[Any]) -> None:
    """Run a command that must succeed."""
    if subprocess.run(command, check=False).returncode:
        raise EngineError(f"failed: {' '.join(map(str, command))}")


def say(message: str) -> None:
    """Report progress on stderr."""
    print(f"engines: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """0 when all is well, 1 when tests fail, 2 when an engine cannot be laid out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", action="store_true", help=f"complete {LOCK.relative_to(ROOT)}")
    parser.add_argument("--test", nargs=argparse.REMAINDER, metavar="PYTEST ARGUMENT")
    options = parser.parse_args()
    engines = [engine for engine in VERSIONS["SUPPORTED"] if ROOT / engine.folder != NEWEST]
    layers = [Layer(engine) for engine in engines if engine.environment is None]
    try:
        if options.lock:
            write_lock(layers)
        lay_out(layers)
    except EngineError as error:
        say(str(error))
        return 2
    return 0 if options.test is None else test(engines, options.test)


if __name__ == "__main__":
    sys.exit(main())
