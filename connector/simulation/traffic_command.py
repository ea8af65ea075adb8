"""``kvlens simulate --trace``: a trace in, the lookups side by side out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvlens.connector.logs import quiet
from kvlens.connector.simulation.command import unwritable
from kvlens.connector.simulation.reading import ScenarioError, parse, read_engine
from kvlens.connector.simulation.scenario import Scenario
from kvlens.connector.simulation.traffic_sums import Findings, Sums, as_text
from kvlens.connector.versions import UnsupportedVLLMError
from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.trace import TraceError

OK, CRITICAL, USAGE = 0, 1, 2
MODES = ("stock", "corrected", "exact")
_DEFAULT = "layout: {groups: [{kind: full_attention, tokens_per_block: 64}]}\nsteps: [{wait: 1}]"
Bar = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]
"""Lookup and number of requests, if known, to what is told of each request."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    trace: Path
    layout: Path | None = None
    block_tokens: int | None = None
    speed: float = 1.0
    requests: int | None = None
    max_output: int = 16
    lookups: Sequence[str] = MODES
    json_path: Path | None = None


def run(options: Options, findings: Callable[[], Findings], bar: Bar) -> int:
    """Drive the trace with each lookup, print the comparison; returns the exit code."""
    try:
        scenario = parse(_DEFAULT) if options.layout is None else read_engine(options.layout)
    except ScenarioError as error:
        return _refuse(str(error))
    if options.json_path is not None and (problem := unwritable(options.json_path)) is not None:
        return _refuse(f"--json {options.json_path}: {problem}")
    with quiet():
        try:
            import vllm  # noqa: F401 - the one dependency that kvlens does not bring
        except ModuleNotFoundError as error:
            return _refuse(
                f"it runs vLLM's own scheduler, and {error.name} is not installed here; use the "
                f"environment of your vLLM, or pip install 'kvlens[cpu]'"
            )
        return _run(options, scenario, findings, bar)


def _run(options: Options, scenario: Scenario, findings: Callable[[], Findings], bar: Bar) -> int:
    from kvlens.connector.config import LookupMode
    from kvlens.connector.simulation.medium import SimulationError
    from kvlens.connector.simulation.traffic import Pace, drive

    arms = []
    for lookup in options.lookups:
        trace = Trace(options.trace, options.block_tokens)
        sums = Sums(lookup, findings())
        try:
            with bar(lookup, options.requests) as progress:
                drive(
                    islice(iter(trace), options.requests),
                    lambda trace=trace: trace.block_tokens,  # type: ignore[misc]
                    scenario,
                    LookupMode(lookup),
                    Pace(options.speed, options.max_output),
                    sums,
                    progress,
                )
        except TraceError as error:
            return _refuse(str(error))
        except (SimulationError, UnsupportedVLLMError) as error:
            return _refuse(f"{options.trace}: {lookup}: {error}")
        arms.append(sums)
    print(as_text(options.trace.name, arms), end="", flush=True)
    if options.json_path is not None:
        body: dict[str, Any] = {
            "trace": options.trace.name,
            "speed": options.speed,
            "arms": [arm.as_json() for arm in arms],
        }
        try:
            encoded = msgspec.json.format(msgspec.json.encode(body), indent=2)
            options.json_path.write_bytes(encoded + b"\n")
        except OSError as error:
            return _refuse(f"--json {options.json_path}: {error.strerror}")
    # What vLLM's own lookup would do is what was asked; a finding is one of what is used.
    used = [arm for arm in arms if arm.lookup != "stock"] or arms
    critical = any(one.severity == "critical" for arm in used for one in arm.findings.found())
    return CRITICAL if critical else OK


def _refuse(message: str) -> int:
    print(f"kvlens simulate: {message}", file=sys.stderr)
    return USAGE
