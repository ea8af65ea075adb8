"""The table of scenarios in docs/compatibility.md is what the tests hold each release to."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_is_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "scenario_table.py"))
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert script["filled"](text) == text, "run python scripts/scenario_table.py"
