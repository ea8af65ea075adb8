"""Unpack a Prometheus 3 beside the system's own, so that rules are tested on both.

Usage: python scripts/newer_prometheus.py

Debian stable has 2.x. The packages of a newer suite are fetched with an apt
configuration of their own and unpacked to `.build/prometheus-3`; the system is
not touched. Where that cannot be had, tests use the system's alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".build" / "prometheus-3"
SUITE = "forky"
PACKAGES = ("prometheus", "promtool")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SOURCES = re.compile(r"^(?:URIs: *|deb (?:\[[^\]]*\] )?)(https?://\S+?/debian)/?(?: |$)", re.M)


def promtool() -> Path | None:
    """The newer promtool, if it is there."""
    path = TARGET / "usr" / "bin" / "promtool"
    return path if path.is_file() else None


def mirror(etc: Path = Path("/etc/apt")) -> str | None:
    """The Debian mirror that apt uses here."""
    for path in sorted([*etc.glob("sources.list"), *etc.glob("sources.list.d/*")]):
        if found := _SOURCES.search(path.read_text(encoding="utf-8", errors="replace")):
            return found[1]
    return None


def install() -> str:
    """Unpack it unless it is there; returns what to tell, empty if nothing."""
    if promtool() is not None:
        return ""
    source = mirror()
    if source is None or shutil.which("apt-get") is None or not KEYRING.is_file():
        return "no Debian mirror, so rules are tested on the system's Prometheus alone"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        options = _private_apt(work, source)
        for command in (
            ["apt-get", *options, "update", "-qq"],
            ["apt-get", *options, "download", "-qq", *PACKAGES],
        ):
            run = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if run.returncode:
                why = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
                return f"no Prometheus of Debian {SUITE} ({why}): rules are tested on 2.x alone"
        unpacked = work / "unpacked"
        for package in work.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        TARGET.parent.mkdir(exist_ok=True)
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.move(unpacked, TARGET)
    return f"unpacked Prometheus of Debian {SUITE} to {TARGET.relative_to(ROOT)}"


def _private_apt(work: Path, source: str) -> list[str]:
    """Options that keep apt's lists, cache and state in ``work``."""
    for name in ("lists/partial", "cache/archives/partial", "parts", "preferences"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {source} {SUITE} main\n")
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": work / "parts",
        "Dir::Etc::preferencesparts": work / "preferences",
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


if __name__ == "__main__":
    print(install() or f"{promtool()} is there")
    sys.exit(0)
