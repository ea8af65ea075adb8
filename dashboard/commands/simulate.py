"""``kvlens simulate``: scenario files on the installed vLLM's own scheduler."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.dashboard.commands.arguments import LOOKUPS, Commands
from kvlens.dashboard.commands.exits import CRITICAL, OK, USAGE, Refusal, complain
from kvlens.dashboard.sizing import traffic


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    simulate = commands.add_parser(
        "simulate",
        help="run scenario files on the installed vLLM's own scheduler, without a model",
        description="Drive the installed vLLM's scheduler, KV-cache manager and the connector by "
        "scenario files (docs/scenarios.md) and print what became of each request. Exit code 1 "
        "if a critical incident was found, 2 if a scenario cannot be used.",
    )
    simulate.add_argument("scenarios", metavar="SCENARIO", nargs="*", type=Path, help="YAML file")
    simulate.add_argument(
        "--lookup",
        choices=LOOKUPS,
        help="how the offload lookup is done (default: corrected; with --trace all three)",
    )
    simulate.add_argument("--json", metavar="FILE", type=Path, help="write all records to FILE")
    traffic.add(simulate)
    # vLLM goes through sets of keys, so runs would differ.
    simulate.set_defaults(run=run, fixed_hashes=True)


def run(options: argparse.Namespace) -> int:
    """Run every scenario that can be used."""
    if options.trace is not None:
        return traffic.run(options)
    if not options.scenarios:
        raise Refusal("give scenario files or --trace FILE")
    from kvlens.connector.simulation import command
    from kvlens.dashboard.detect.offline import detect
    from kvlens.dashboard.detect.panel import all_detectors
    from kvlens.dashboard.settings import SettingsError, load_settings

    refused = []

    def refuse(message: str) -> None:
        refused.append(message)
        complain("simulate", message)

    try:
        settings = load_settings()
    except SettingsError as error:
        raise Refusal(str(error)) from error
    critical = command.run(
        options.scenarios,
        options.lookup or "corrected",
        options.json,
        lambda engine, finished, waiting: detect(
            engine, finished, waiting, all_detectors(settings.thresholds)
        ),
        refuse,
    )
    return USAGE if refused else CRITICAL if critical else OK
