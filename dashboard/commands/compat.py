"""``kvlens compat``: what kvlens sees and corrects on the vLLM that is installed here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvlens.dashboard.commands.arguments import Commands
from kvlens.dashboard.commands.exits import OK, Refusal

REDUCED = 1
"""Exit code where something is missing, though kvlens runs."""


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    compat = commands.add_parser(
        "compat",
        help="what kvlens sees and corrects on the vLLM installed here",
        description="List the private names of vLLM that kvlens uses, the corrections that this "
        "vLLM needs, and how deep kvlens sees. Exit code 0: everything; 1: reduced; 2: it cannot "
        "run.",
    )
    compat.add_argument("--json", metavar="FILE", type=Path, help="write the findings to FILE")
    compat.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table, and write the file if one is given."""
    from kvlens.connector.logs import quiet
    from kvlens.connector.versions import UnsupportedVLLMError

    try:
        with quiet():
            from kvlens.connector import survey

            found = survey.compat()
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvlens":
            raise
        raise Refusal(
            f"{error.name} is not installed here: run it in the environment of your vLLM"
        ) from error
    except (ImportError, UnsupportedVLLMError) as error:
        raise Refusal(str(error)) from error
    path: Path | None = options.json
    if path is not None:
        try:
            path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise Refusal(f"--json {path}: {error.strerror}") from error
    print(as_text(found))
    return OK if complete(found) else REDUCED


def complete(found: dict[str, Any]) -> bool:
    """Whether nothing is missing: every symbol is there and no correction is unknown."""
    known = all(item["state"] != "unknown" for item in found["corrections"])
    return known and found["depth"] == "groups" and all(s["present"] for s in found["symbols"])


def as_text(found: dict[str, Any]) -> str:
    """The table for people."""
    from kvlens.connector.versions import RANGE

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
