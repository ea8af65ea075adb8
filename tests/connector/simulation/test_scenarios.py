"""Every scenario file, in every lookup mode, against what field-tested cases demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from kvlens.connector.config import LookupMode
from kvlens.connector.simulation.driver import simulate
from kvlens.connector.simulation.medium import SimulationError
from kvlens.connector.simulation.reading import read
from kvlens.connector.support import vllm_version
from kvlens.dashboard.detect.offline import detect
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.settings import Settings

SCENARIOS = Path(__file__).parents[2] / "scenarios"
EXPECTED: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    (SCENARIOS / "expected" / "verdicts.yaml").read_text()
)


def expected(name: str, mode: str) -> dict[str, Any]:
    """The outcome that fits this engine and mode."""
    return next(
        outcome
        for outcome in EXPECTED[name]
        if SpecifierSet(outcome.get("vllm", "")).contains(vllm_version(), prereleases=True)
        and mode in outcome.get("lookup", [mode])
    )


FILES = {
    path.stem: path
    for folder in (SCENARIOS, SCENARIOS / "older")  # older: what newer releases refuse
    for path in folder.glob("*.yaml")
}


def test_every_scenario_file_has_its_expected_verdicts():
    assert FILES.keys() == EXPECTED.keys()


@pytest.mark.parametrize("mode", [mode.value for mode in LookupMode])
@pytest.mark.parametrize("name", EXPECTED)
def test_scenario(name: str, mode: str):
    wanted = expected(name, mode)
    scenario = read(FILES[name])
    if "error" in wanted:
        with pytest.raises(SimulationError, match=wanted["error"]):
            simulate(scenario, name, LookupMode(mode))
        return
    result = simulate(scenario, name, LookupMode(mode))
    said = [[r.verdict, r.cause, r.served_tokens] for r in result.requests]
    told = wanted["requests"]
    warm_up = said[: len(said) - len(told)]
    assert said[len(warm_up) :] == told
    assert {(verdict, served) for verdict, _, served in warm_up} <= {("cold", 0)}

    troubled = [r for r in result.requests if r.cause is not None]
    for field, value in wanted.get("evidence", {}).items():
        assert [r.evidence.get(field) for r in troubled] == [value] * len(troubled)

    detectors = all_detectors(Settings().thresholds)
    incidents = detect(result.engine, result.requests, result.waiting, detectors)
    assert {incident.kind for incident in incidents} == set(wanted.get("incidents", ()))


def test_no_mode_of_kvlens_serves_less_than_stock_but_for_safety():
    for name in ("f01_drafter_fallback", "f07_pop_without_widening", "f06_coarse_chunk"):
        scenario = read(SCENARIOS / f"{name}.yaml")
        stock, corrected, exact = (
            sum(r.served_tokens for r in simulate(scenario, name, mode).requests)
            for mode in (LookupMode.STOCK, LookupMode.CORRECTED, LookupMode.EXACT)
        )
        assert stock <= corrected <= exact
