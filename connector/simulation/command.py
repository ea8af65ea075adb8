"""``kvlens simulate``: scenario files in, a table and JSON out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlens.connector.logs import quiet
from kvlens.connector.simulation.reading import ScenarioError, read
from kvlens.connector.simulation.scenario import Scenario
from kvlens.connector.versions import UnsupportedVLLMError

OK, CRITICAL, USAGE = 0, 1, 2
Detect = Callable[[Any, Any, Any], Sequence[Any]]
"""``EngineInfo``, records of finished and in-flight ones of waiting requests, to incidents."""


def run(paths: Sequence[Path], lookup: str, json_path: Path | None, detect: Detect) -> int:
    """Run scenario files, print what came of them; returns the exit code."""
    try:
        scenarios = [(path, read(path)) for path in paths]
    except ScenarioError as error:
        return _refuse(str(error))
    if json_path is not None and (problem := _unwritable(json_path)) is not None:
        return _refuse(f"--json {json_path}: {problem}")
    with quiet():
        try:
            import vllm  # noqa: F401 - the one dependency that kvlens does not bring
        except ModuleNotFoundError as error:
            return _refuse(
                f"it runs vLLM's own scheduler, and {error.name} is not installed here; use the "
                f"environment of your vLLM, or pip install 'kvlens[cpu]'"
            )
        return _run(scenarios, lookup, json_path, detect)


def _unwritable(path: Path) -> str | None:
    """Why ``path`` cannot be written, found before minutes of work; None if it can."""
    try:
        path.open("ab").close()
    except OSError as error:
        return error.strerror
    return None


def _run(
    scenarios: Sequence[tuple[Path, Scenario]], lookup: str, json_path: Path | None, detect: Detect
) -> int:
    from kvlens.connector.config import LookupMode
    from kvlens.connector.simulation import report
    from kvlens.connector.simulation.driver import simulate
    from kvlens.connector.simulation.medium import SimulationError

    done, refused = [], OK
    for path, scenario in scenarios:
        try:
            result = simulate(scenario, path.stem, LookupMode(lookup))
        except (SimulationError, UnsupportedVLLMError) as error:
            refused = _refuse(f"{path}: {error}")  # the others may run all the same
            continue
        incidents = detect(result.engine, result.requests, result.waiting)
        done.append((result, incidents))
        print(report.as_text(result, incidents), flush=True)
    if json_path is not None:
        try:
            json_path.write_bytes(report.as_json(done))
        except OSError as error:
            return _refuse(f"--json {json_path}: {error.strerror}")
    critical = any(incident.severity == "critical" for _, found in done for incident in found)
    return refused or (CRITICAL if critical else OK)


def _refuse(message: str) -> int:
    print(f"kvlens simulate: {message}", file=sys.stderr)
    return USAGE
