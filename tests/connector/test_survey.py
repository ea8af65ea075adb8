"""docs/compatibility.md says of this release what this release says."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvlens.connector import versions
from kvlens.connector.survey import survey

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "compatibility.py"))
TEXT = SCRIPT["DOCUMENT"].read_text()


def part(name):
    return TEXT.split(f"<!-- generated: {name} -->\n")[1].split(f"<!-- end: {name} -->")[0]


@pytest.mark.parametrize("name", ["corrections", "traits"])
def test_the_row_of_this_vllm_is_current(name):
    assert SCRIPT["rows"](survey())[name] in part(name).splitlines(), "run scripts/compatibility.py"


@pytest.mark.parametrize("name", ["corrections", "traits"])
def test_there_is_a_row_for_each_release_and_no_other(name):
    _, _, *rows = part(name).splitlines()
    listed = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert listed == [engine.version for engine in versions.SUPPORTED]


def test_the_range_is_named():
    assert f"runs on vLLM {versions.RANGE}" in TEXT


def test_marked_parts_are_replaced_and_nothing_else():
    text = "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb\n"
    filled = SCRIPT["fill"](text, {"x": "new\nlines"})
    assert filled == "a\n<!-- generated: x -->\nnew\nlines\n<!-- end: x -->\nb\n"
    with pytest.raises(SystemExit, match="0 parts marked <!-- generated: y -->"):
        SCRIPT["fill"](text, {"y": ""})
