"""``kvlens replay``: what other lookups would have served of a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.dashboard.commands.arguments import LOOKUPS, Commands
from kvlens.dashboard.commands.exits import CRITICAL, OK, Refusal, write


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    replay = commands.add_parser(
        "replay",
        help="do a recording's lookups again: what would have been served, and which incidents",
        description="Go through flight-recorder files (docs/flight-recorder.md): what each search "
        "would have served of what was resident, and the incidents that a dashboard would have "
        "opened. Exit code 1 if one is critical or a request was served an unsafe boundary, 2 if "
        "a file is not one.",
    )
    replay.add_argument("files", metavar="FILE", nargs="+", type=Path, help="file or folder")
    replay.add_argument(
        "--lookup",
        choices=LOOKUPS,
        default="exact",
        help="the search to compare with what was served (default: %(default)s)",
    )
    replay.add_argument("--json", metavar="FILE", type=Path, help="write all numbers to FILE")
    replay.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay all recordings, print and write what came of it."""
    try:
        from kvlens.dashboard.detect.panel import all_detectors
        from kvlens.dashboard.settings import SettingsError, load_settings
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvlens":
            raise
        raise Refusal(
            f"its detectors need {error.name}: pip install 'kvlens[dashboard]' "
            "(kvlens inspect does without)"
        ) from error
    from kvlens.dashboard.flight.incidents import replay_incidents
    from kvlens.dashboard.flight.recordings import load
    from kvlens.dashboard.flight.report import ReplayReport, as_json, show
    from kvlens.dashboard.flight.terminal import safe
    from kvlens.telemetry.flight.reader import FlightFileError

    report = ReplayReport(options.lookup, rows=[] if options.json else None)
    try:
        detectors = all_detectors(load_settings().thresholds)
        recordings = load(options.files)
        report.incidents = replay_incidents(recordings, detectors, report.take)
    except (FlightFileError, SettingsError) as error:
        raise Refusal(safe(str(error))) from error
    if options.json is not None:
        write("--json", options.json, as_json(report, recordings))
    show(report, recordings)
    return CRITICAL if report.critical else OK
