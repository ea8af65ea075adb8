"""``kvlens inspect``: what a flight recorder kept."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.dashboard.commands.arguments import Commands
from kvlens.dashboard.commands.exits import OK, Refusal
from kvlens.telemetry.semconv import Cause, Verdict


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    inspect = commands.add_parser(
        "inspect",
        help="show what a flight recorder kept",
        description="Show the requests in flight-recorder files (docs/flight-recorder.md), one of "
        "them in full with --request. Exit code 2 if a file is not one.",
    )
    inspect.add_argument("files", metavar="FILE", nargs="+", type=Path, help="file or folder")
    inspect.add_argument("--request", metavar="ID", help="this request in full")
    for name, known in (("verdict", Verdict), ("cause", Cause)):
        inspect.add_argument(
            f"--{name}", choices=[str(one) for one in known], action="append", default=[]
        )
    inspect.add_argument(
        "--since", metavar="TIME", type=_time, help="Unix seconds, or 2026-09-07T12:00:00 (UTC)"
    )
    inspect.add_argument("--until", metavar="TIME", type=_time, help="both by time of finish")
    inspect.add_argument("--json", action="store_true", help="print records as JSON lines")
    inspect.set_defaults(run=run)


def _time(text: str) -> float:
    from kvlens.dashboard.flight.inspect import parse_time

    try:
        return parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: give Unix seconds or 2026-09-07T12:00:00"
        ) from error


def run(options: argparse.Namespace) -> int:
    """Print the records that match."""
    from kvlens.dashboard.flight import inspect
    from kvlens.dashboard.flight.terminal import safe
    from kvlens.telemetry.flight.reader import FlightFileError

    wanted = inspect.RecordFilter(
        request=options.request,
        verdicts=options.verdict,
        causes=options.cause,
        since=options.since,
        until=options.until,
    )
    try:
        inspect.show(options.files, wanted, options.json)
    except (FlightFileError, inspect.NoMatchError) as error:
        raise Refusal(safe(str(error))) from error
    return OK
