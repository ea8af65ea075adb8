"""Rules and detectors on the same runs: where they say the same, and where and why not.

Each run is vLLM's own scheduler on a scenario. The detectors get its records; the rules get, by
way of promtool, the numbers that Prometheus would have scraped from it every minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import runs
from stack import ROOT
from test_rules import promtool

from grafana import alerts, rule_cases, rule_tests
from grafana.rulefile import dump
from kvlens.connector.config import LookupMode

pytest.importorskip("vllm")
RULES = ROOT / "grafana" / "rules"
KIND_OF = {item.name: str(item.page) for item in alerts.alerts()}
FULL = "layout: {groups: [{kind: full_attention, tokens_per_block: 256}]}\n"
GAPS = (
    "layout: {groups: [{kind: full_attention, tokens_per_block: 256, drafter: true}]}\n"
    "speculative: eagle\n"
)
WINDOW = (
    "layout: {groups: [{kind: full_attention, tokens_per_block: 16},"
    " {kind: sliding_window, tokens_per_block: 16, window: 128, drafter: true}]}\n"
    "speculative: mtp\nretention_interval: all\n"
)
STATES = (
    "layout: {groups: [{kind: full_attention, tokens_per_block: 16},"
    " {kind: mamba, tokens_per_block: 64}]}\n"
)
AGAIN = "      - {reset_gpu_cache: true}\n      - {wait: 60}\n"


def every_minute(step: str, times: int = 30) -> str:
    """The same request once a minute, each time after the GPU cache was emptied."""
    return f"  - repeat: {times}\n    steps:\n{AGAIN}      - {step}\n"


@dataclass(frozen=True)
class Case:
    """``only_rules`` and ``only_detectors`` give kinds that the other one does not tell of, and
    why."""

    scenario: str
    both: frozenset[str] = frozenset()
    only_rules: dict[str, str] = field(default_factory=dict)
    only_detectors: dict[str, str] = field(default_factory=dict)
    lookup: LookupMode = LookupMode.CORRECTED


CASES = {
    "all served": Case(
        FULL
        + "steps:\n  - {prompt: {seed: 1, tokens: 3000}}\n"
        + every_minute("{prompt: {seed: 1, tokens: 3000}}")
    ),
    "N4, prompts without a prefix in common": Case(
        FULL + "step_seconds: 6\nsteps:\n"
        "  - {prompt: {seed: 1, tokens: 1000}, times: 40, unique: true}\n"
    ),
    "N6, requests that do not read": Case(
        FULL
        + "steps:\n  - {prompt: {seed: 1, tokens: 3000}}\n"
        + every_minute("{prompt: {seed: 1, tokens: 3000}, skip_reading_prefix_cache: true}")
    ),
    "F4, a window that is one chunk short": Case(
        WINDOW
        + "steps:\n"
        + every_minute("{prompt: {seed: 1, tokens: 1100}, only_chunks: {1: ['60-67']}}"),
        both=frozenset({"zero_hit"}),
    ),
    "F2, a gap in what is stored": Case(
        GAPS
        + "steps:\n"
        + every_minute("{prompt: {seed: 1, tokens: 12000}, drop_chunks: {0: [31]}}"),
        both=frozenset({"store_gaps"}),
        only_detectors={"lost_hits": "the burn rate is of servable tokens; these were not stored"},
    ),
    "F8, evicted before it comes back": Case(
        FULL
        + "capacity_chunks: 16\nsteps:\n  - repeat: 15\n    steps:\n"
        + AGAIN
        + "      - {prompt: {seed: 1, tokens: 4000}}\n"
        + AGAIN
        + "      - {prompt: {seed: 2, tokens: 4000}}\n",
        both=frozenset({"capacity_thrash"}),
    ),
    "F10, a write that never ends": Case(
        FULL + "step_seconds: 1\nsteps:\n  - {backend: {stores: hang}}\n"
        "  - {prompt: {seed: 1, tokens: 2000}}\n  - {reset_gpu_cache: true}\n"
        "  - {prompt: {seed: 1, tokens: 2000}, abort_after: 600}\n",
        both=frozenset({"deferral_stall"}),
    ),
    "F13, a boundary without a state": Case(
        STATES + "steps:\n  - {store: {seed: 1, tokens: 300}, only_chunks: {0: ['0-10']}}\n"
        "  - {prompt: {seed: 1, tokens: 300}}\n  - {wait: 120}\n",
        both=frozenset({"unsafe_boundary"}),
        lookup=LookupMode.STOCK,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_and_detectors_tell_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    run = runs.run(case.scenario, "agreement", case.lookup, monkeypatch)
    assert run.incidents == case.both | case.only_detectors.keys()
    assert firing(run, tmp_path) == case.both | case.only_rules.keys()


def firing(run: runs.Run, folder: Path) -> set[str]:
    """Kinds whose alert fires in some minute of the run."""
    quiet = {minute: {} for minute in range(run.minutes + 1)}
    test = rule_cases.Case("run", run.series, quiet)
    path = folder / "run.test.yml"
    files = [str(rules) for rules in sorted(RULES.glob("*.yml"))]
    path.write_text(
        dump(
            {
                "rule_files": files,
                "evaluation_interval": "1m",
                "group_eval_order": rule_tests.EVALUATED,
                "tests": [test.test()],
            }
        )
    )
    said = promtool("test", "rules", path)
    text = said.stdout + said.stderr
    assert said.returncode in (0, 1), text
    assert said.returncode == 0 or "FAILED" in text, text
    return {kind for alert, kind in KIND_OF.items() if f'alertname="{alert}"' in text}


@pytest.mark.parametrize("name", CASES)
def test_each_difference_is_in_the_documents(name: str) -> None:
    case = CASES[name]
    told = (ROOT / "docs" / "runbooks" / "README.md").read_text(encoding="utf-8")
    for kind in {*case.only_rules, *case.only_detectors}:
        assert f"| `{kind}` |" in told.split("## Where alerts and incidents differ")[1]
