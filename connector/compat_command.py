"""``kvlens compat``: what kvlens sees and corrects on the vLLM that is installed here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvlens.connector.logs import quiet
from kvlens.connector.versions import RANGE, UnsupportedVLLMError

FULL, REDUCED, CANNOT_RUN = 0, 1, 2
"""Exit codes."""


def run(json_path: Path | None) -> int:
    """Print the table, and write ``json_path`` if it is given; returns the exit code."""
    try:
        with quiet():
            from kvlens.connector import survey

            found = survey.compat()
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvlens":
            raise
        return _refuse(
            f"{error.name} is not installed here: run it in the environment of your vLLM"
        )
    except (ImportError, UnsupportedVLLMError) as error:
        return _refuse(str(error))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            return _refuse(f"--json {json_path}: {error.strerror}")
    print(as_text(found))
    return FULL if complete(found) else REDUCED


def complete(found: dict[str, Any]) -> bool:
    """Whether nothing is missing: every symbol is there and no correction is unknown."""
    known = all(item["state"] != "unknown" for item in found["corrections"])
    return known and found["depth"] == "groups" and all(s["present"] for s in found["symbols"])


def as_text(found: dict[str, Any]) -> str:
    """The table for people."""
    tested = "tested" if found["tested"] else f"untested (tested are {RANGE})"
    lines = [f"vLLM {found['vllm_version']}, {tested}: kvlens sees it at {found['depth']} depth."]
    missing = [symbol for symbol in found["symbols"] if not symbol["present"]]
    there = len(found["symbols"]) - len(missing)
    lines.append(f"\nPrivate names of vLLM: {there} of {len(found['symbols'])} are as expected.")
    lines += [f"  {one['problem']}\n    lost: {one['lost']}" for one in missing]
    lines.append("\nCorrections:" if found["corrections"] else "\nCorrections: none at this depth.")
    width = max((len(item["name"]) for item in found["corrections"]), default=0)
    lines += [
        f"  {item['name']:{width}}  {item['state']:10}  {item['reason']}"
        for item in found["corrections"]
    ]
    return "\n".join(lines)


def _refuse(message: str) -> int:
    print(f"kvlens compat: {message}", file=sys.stderr)
    return CANNOT_RUN
