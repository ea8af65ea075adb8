"""Write the table of scenarios in docs/compatibility.md from their expected verdicts.

Usage: python scripts/scenario_table.py

Each release's tests run every scenario and hold it to tests/scenarios/expected, so the
table says what was seen. Neighbouring releases and lookup modes with equal rows are one.
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = ROOT / "tests" / "scenarios" / "expected" / "verdicts.yaml"
MODES = ("stock", "corrected", "exact")
VERSIONS = [
    engine.version
    for engine in runpy.run_path(str(ROOT / "connector" / "versions.py"))["SUPPORTED"]
]
_COMPATIBILITY = runpy.run_path(str(ROOT / "scripts" / "compatibility.py"))


def outcome(outcomes: list[dict[str, Any]], version: str, mode: str) -> dict[str, Any]:
    """The first outcome that is meant for this release and lookup mode."""
    return next(
        entry
        for entry in outcomes
        if SpecifierSet(entry.get("vllm", "")).contains(version, prereleases=True)
        and mode in entry.get("lookup", [mode])
    )


def cell(entry: dict[str, Any]) -> str:
    """Verdicts and causes of the later requests, in order and once each, then incidents."""
    if "error" in entry:
        return "vLLM refuses"
    said = dict.fromkeys(
        f"{verdict} {cause}" if cause else verdict for verdict, cause, _ in entry["requests"]
    )
    incidents = [f"*{kind}*" for kind in entry.get("incidents", ())]
    return ", ".join([*(list(said) or ["cold"]), *incidents])


def table() -> str:
    """The table as Markdown."""
    expected: dict[str, Any] = yaml.safe_load(EXPECTED.read_text())
    cells = {
        version: {
            (name, mode): cell(outcome(outcomes, version, mode))
            for name, outcomes in expected.items()
            for mode in MODES
        }
        for version in VERSIONS
    }
    ranges = [list(group) for _, group in groupby(VERSIONS, key=lambda v: list(cells[v].items()))]
    row = _COMPATIBILITY["row"]
    names = (" to ".join(dict.fromkeys((group[0], group[-1]))) for group in ranges)
    lines = [row(["scenario", "lookup", *names]), row(["---"] * (2 + len(ranges)))]
    for name in sorted(expected):
        rows = [(mode, [cells[group[0]][name, mode] for group in ranges]) for mode in MODES]
        for values, same in groupby(rows, key=lambda item: item[1]):
            modes = ", ".join(mode for mode, _ in same)
            lines.append(row([f"`{name}`", "all" if modes.count(",") == 2 else modes, *values]))
    return "\n".join(lines)


def filled(text: str) -> str:
    """The document with the table in it."""
    changed: str = _COMPATIBILITY["fill"](text, {"scenarios": table()})
    return changed


if __name__ == "__main__":
    document = _COMPATIBILITY["DOCUMENT"]
    document.write_text(filled(document.read_text()))
    sys.exit(0)
