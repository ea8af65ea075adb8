"""Build the environments that `make demo` and `make test` use, from an empty checkout.

Plain standard library: it runs on the Python that starts it and builds the
environments with the best one it finds. A stamp, written last, says what an
environment holds, so an interrupted run is repeated and a finished one costs
nothing; a file lock keeps runs that start together from building twice.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import newer_prometheus

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {
    ".venv": ("engine-0.32.0", "test", "dev"),
    ".venv-affected": ("engine-0.29.0", "test"),
}
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3")
SUPPORTED = ((3, 11), (3, 13))
"""First and last Python for which every pinned package exists."""
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SYSTEM_TOOLS = [
    # (command, variable that names another one, Debian packages that bring it, who needs it)
    ("chromium", "KVLENS_TEST_CHROMIUM", ("chromium", "fonts-liberation"), "browser tests"),
    (
        "prometheus-alertmanager",
        "KVLENS_TEST_ALERTMANAGER",
        ("prometheus-alertmanager",),
        "tests of notifications",
    ),
    ("prometheus", "KVLENS_TEST_PROMETHEUS", ("prometheus",), "tests of boards and alerts"),
    ("promtool", "KVLENS_TEST_PROMTOOL", ("prometheus",), "tests of rules"),
]


class SetupError(Exception):
    """Set-up cannot go on; the message names what to change."""


def find_python() -> str:
    """Return a Python that can build the environments (``KVLENS_PYTHON`` wins)."""
    chosen = os.environ.get("KVLENS_PYTHON")
    probe = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    seen = []
    for name in (chosen,) if chosen else PYTHONS:
        path = shutil.which(name)
        if path is None:
            seen.append(f"{name}: not found")
            continue
        run = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["it fails"])[-1]
            seen.append(f"{name}: {reason}")
            continue
        version = tuple(int(part) for part in run.stdout.split())
        if SUPPORTED[0] <= version <= SUPPORTED[1]:
            return path
        seen.append(f"{name}: {version[0]}.{version[1]}")
    low, high = (f"{major}.{minor}" for major, minor in SUPPORTED)
    raise SetupError(
        f"Python {low} to {high} with venv is needed (3.11 is what the locks were made with); "
        f"found: {'; '.join(seen)}. Install one, or name it in KVLENS_PYTHON."
    )


def digest(*paths: Path) -> str:
    """Hash the files' content together with where the checkout lies."""
    total = hashlib.sha256(str(ROOT).encode())
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()


class Environment:
    """One virtual environment of the checkout."""

    def __init__(self, name: str, locks: tuple[str, ...]) -> None:
        self.path = ROOT / name
        self.locks = [ROOT / "requirements" / f"{lock}.txt" for lock in locks]
        self.stamp = self.path / "kvlens-setup"
        self.packages = digest(*self.locks)
        self.project = digest(ROOT / "pyproject.toml")

    def state(self) -> tuple[bool, bool]:
        """Whether the packages, and whether the project itself, are as wanted."""
        lines = self.stamp.read_text().split() if self.stamp.is_file() else []
        alive = len(lines) == 2 and (self.path / "bin" / "python").exists()
        return alive and lines[0] == self.packages, alive and lines[1] == self.project

    def build(self) -> None:
        """Bring the environment to the wanted state."""
        packages_ready, project_ready = self.state()
        if not packages_ready:
            self._install_packages()
        if not (packages_ready and project_ready):
            self.stamp.unlink(missing_ok=True)
            self._pip("--no-build-isolation", "-e", str(ROOT))
            self.stamp.write_text(f"{self.packages}\n{self.project}\n")
        say(f"{self.path.name} is ready")

    def _install_packages(self) -> None:
        say(f"building {self.path.name}: {', '.join(lock.stem for lock in self.locks)} (minutes)")
        if self.path.is_symlink() or self.path.is_file():
            raise SetupError(f"{self.path} is not a folder: move it away")
        shutil.rmtree(self.path, ignore_errors=True)
        command = [find_python(), "-m", "venv", str(self.path)]
        if subprocess.run(command, check=False).returncode:
            raise SetupError(f"cannot create {self.path}: see above")
        self._install_torch()
        self._pip(*(part for lock in self.locks for part in ("-r", str(lock))))

    def _install_torch(self) -> None:
        """Install the CPU build, from PyTorch's own index where pip's sources lack it."""
        lines = self.locks[0].read_text().splitlines()
        torch = next(line for line in lines if line.startswith("torch=="))
        try:
            self._pip(torch, quiet=True)
        except SetupError:
            say(f"{torch} is not in pip's sources, taking it from {CPU_TORCH_INDEX}")
            self._pip(torch, "--extra-index-url", CPU_TORCH_INDEX)

    def _pip(self, *arguments: str, quiet: bool = False) -> None:
        command = [str(self.path / "bin" / "python"), "-m", "pip", "install", "-qq"]
        command += ["--no-input", "--disable-pip-version-check", "--no-deps", *arguments]
        stderr = subprocess.DEVNULL if quiet else None
        if subprocess.run(command, stderr=stderr, check=False).returncode:
            raise SetupError(f"failed: {' '.join(command)}")


def install_system_tools() -> None:
    """Install missing programs from Debian packages, or say which are missing."""
    missing = [tool for tool in SYSTEM_TOOLS if not shutil.which(os.environ.get(tool[1], tool[0]))]
    if not missing:
        return
    packages = [package for tool in missing for package in tool[2]]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        for command, variable, names, purpose in missing:
            say(
                f"no {command}, so {purpose} are skipped: install {' '.join(names)}, or name the "
                f"program in {variable}"
            )
        return
    say(f"installing {' '.join(packages)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for step in (["apt-get", "update", "-qq"], install):
        run = subprocess.run(step, env=quiet, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SetupError(f"failed: {' '.join(step)}\n{run.stdout[-2000:]}{run.stderr}")


def say(message: str) -> None:
    """Report progress on stderr."""
    sys.stderr.write(f"setup: {message}\n")  # one write: environments are built side by side


def main() -> int:
    """Set up; 0 when everything is in place, 2 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", action="store_true", help="also programs that only tests need")
    options = parser.parse_args()
    environments = [Environment(name, locks) for name, locks in ENVIRONMENTS.items()]
    try:
        if not all(all(environment.state()) for environment in environments):
            lock = ROOT / ".build" / "setup.lock"
            lock.parent.mkdir(exist_ok=True)
            with lock.open("w") as handle, ThreadPoolExecutor() as pool:
                fcntl.flock(handle, fcntl.LOCK_EX)
                list(pool.map(Environment.build, environments))
        if options.system:
            install_system_tools()
            if told := newer_prometheus.install():
                say(told)
    except SetupError as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
