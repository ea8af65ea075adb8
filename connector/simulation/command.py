"""Scenario files in, a table and JSON out; `kvlens simulate` calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlens.connector.logs import quiet
from kvlens.connector.simulation.reading import ScenarioError, read
from kvlens.connector.simulation.scenario import Scenario
from kvlens.connector.versions import UnsupportedVLLMError

Refuse = Callable[[str], None]
"""Tells whoever called why something could not be done."""
Detect = Callable[[Any, Any, Any], Sequence[Any]]
"""``EngineInfo``, records of finished and in-flight ones of waiting requests, to incidents."""


def run(
    paths: Sequence[Path], lookup: str, json_path: Path | None, detect: Detect, refuse: Refuse
) -> bool:
    """Run scenario files, print what came of them; returns whether an incident is critical."""
    try:
        scenarios = [(path, read(path)) for path in paths]
    except ScenarioError as error:
        refuse(str(error))
        return False
    if json_path is not None and (problem := unwritable(json_path)) is not None:
        refuse(f"--json {json_path}: {problem}")
        return False
    with quiet():
        try:
            import vllm  # noqa: F401 - the one dependency that kvlens does not bring
        except ModuleNotFoundError as error:
            refuse(
                f"it runs vLLM's own scheduler, and {error.name} is not installed here; use the "
                f"environment of your vLLM, or pip install 'kvlens[cpu]'"
            )
            return False
        return _run(scenarios, lookup, json_path, detect, refuse)


def unwritable(path: Path) -> str | None:
    """Why ``path`` cannot be written, found before minutes of work; None if it can."""
    try:
        path.open("ab").close()
    except OSError as error:
        return error.strerror
    return None


def _run(
    scenarios: Sequence[tuple[Path, Scenario]],
    lookup: str,
    json_path: Path | None,
    detect: Detect,
    refuse: Refuse,
) -> bool:
    from kvlens.connector.config import LookupMode
    from kvlens.connector.simulation import report
    from kvlens.connector.simulation.driver import simulate
    from kvlens.connector.simulation.medium import SimulationError

    done = []
    for path, scenario in scenarios:
        try:
            result = simulate(scenario, path.stem, LookupMode(lookup))
        except (SimulationError, UnsupportedVLLMError) as error:
            refuse(f"{path}: {error}")  # the others may run all the same
            continue
        incidents = detect(result.engine, result.requests, result.waiting)
        done.append((result, incidents))
        print(report.as_text(result, incidents), flush=True)
    if json_path is not None:
        try:
            json_path.write_bytes(report.as_json(done))
        except OSError as error:
            refuse(f"--json {json_path}: {error.strerror}")
    return any(incident.severity == "critical" for _, found in done for incident in found)
