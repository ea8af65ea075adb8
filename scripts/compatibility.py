"""Write the tables of docs/compatibility.md from what each supported vLLM answers.

Usage: python scripts/compatibility.py        (after `make engines`; about 10 s per engine)

The document is written by hand but for its marked parts. A test on each engine holds
that engine's rows against what it answers then.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "compatibility.md"
SUPPORTED = runpy.run_path(str(ROOT / "connector" / "versions.py"))["SUPPORTED"]
AT_ONCE = 2
STATES = {"active": "**corrected**", "not_needed": "not needed", "unknown": "unknown"}
Survey = dict[str, Any]


def ask(engine: Any) -> Survey:
    """What one engine answers (``kvlens.connector.survey``)."""
    python = ROOT / engine.folder / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"vLLM {engine.version} is not there: run `make engines`")
    command = [python, "-m", "kvlens.connector.survey"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"vLLM {engine.version} cannot be asked:\n{run.stderr}")
    answer: Survey = json.loads(run.stdout.splitlines()[-1])  # vLLM may log before it
    return answer


def row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rows(survey: Survey) -> dict[str, str]:
    """One release's line in each table."""
    level = next(e.level.value for e in SUPPORTED if e.version == survey["version"])
    traits = ("yes" if has else "no" for has in survey["traits"].values())
    states = (STATES[state] for state in survey["corrections"].values())
    return {
        "corrections": row([survey["version"], level, *states]),
        "traits": row([survey["version"], *traits]),
    }


def tables(surveys: list[Survey]) -> dict[str, str]:
    """Every marked part of the document, by its name."""
    heads = {
        "corrections": ["vLLM", "tests", *(f"`{name}`" for name in surveys[0]["corrections"])],
        "traits": ["vLLM", *surveys[0]["traits"]],
    }
    lines = [rows(survey) for survey in surveys]
    return {
        name: "\n".join([row(head), row(["---"] * len(head)), *(line[name] for line in lines)])
        for name, head in heads.items()
    }


def fill(text: str, parts: dict[str, str]) -> str:
    """``text`` with its marked parts replaced."""
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        new = f"{begin}{part}\n{end}"
        text, found = re.subn(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"{DOCUMENT} has {found} parts marked {begin.strip()}, not 1")
    return text


def main() -> int:
    """Ask all engines and write the document."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        surveys = list(pool.map(ask, SUPPORTED))
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), tables(surveys)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
