"""``kvlens doctor URL | BEFORE.txt AFTER.txt``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvlens.dashboard.commands.arguments import Commands, seconds
from kvlens.dashboard.commands.exits import CRITICAL, OK, Refusal, complain, write

if TYPE_CHECKING:
    from kvlens.dashboard.doctor.source import Pages

PAGES: Final = 2
_SUFFIXES: Final = (".txt", ".prom", ".metrics", ".log", ".json", ".gz")


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with a vLLM server's KV offloading, from its /metrics",
        description="Examine any vLLM server, with or without kvlens, from its /metrics page now "
        "and a little later, or from two saved pages. Exit code 1 if a finding is critical, 2 if "
        "a page cannot be read.",
    )
    doctor.add_argument(
        "sources",
        metavar="URL | BEFORE AFTER",
        nargs="+",
        help="address of the server, or two saved pages, the earlier one first",
    )
    doctor.add_argument(
        "--wait", metavar="SECONDS", type=seconds, default=10.0, help="between two looks (10)"
    )
    doctor.add_argument("--json", metavar="FILE", type=Path, help="write the report to FILE")
    doctor.add_argument(
        "--bundle", metavar="FILE", type=Path, help="write one redacted file for a bug report"
    )
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine, print, write what was asked for."""
    from kvlens.dashboard.doctor.bundle import bundle
    from kvlens.dashboard.doctor.report import Report, diagnose, text
    from kvlens.dashboard.doctor.source import SourceError
    from kvlens.dashboard.settings import SettingsError, load_settings

    try:
        settings = load_settings()
        pages = _pages(options.sources, options.wait)
        report = Report(
            pages.name,
            [
                diagnose(windows, settings.thresholds(windows[0].after.model))
                for windows in pages.windows
            ],
        )
    except (SourceError, SettingsError) as error:
        raise Refusal(str(error)) from error
    if options.json is not None:
        write("--json", options.json, json.dumps(report.as_dict(), indent=2) + "\n")
    if options.bundle is not None:
        write("--bundle", options.bundle, bundle(report, pages.texts) + "\n")
    print(text(report))
    return CRITICAL if report.critical else OK


def _pages(sources: Sequence[str], wait: float) -> Pages:
    from kvlens.dashboard.doctor.source import SourceError, from_files, from_url

    if len(sources) > 1 and any("://" in source for source in sources):
        raise SourceError("give one address, or two saved pages: two servers are two calls")
    if len(sources) == PAGES:
        return from_files(Path(sources[0]), Path(sources[1]))
    if len(sources) > PAGES:
        raise SourceError("give one address, or two saved pages: the earlier one first")
    if Path(sources[0]).is_file():
        raise SourceError(
            f"one page alone tells nothing about now: save another one some minutes later "
            f"(curl http://host:port/metrics > after.txt) and give {sources[0]} first"
        )
    if _is_path(sources[0]):
        raise SourceError(f"{sources[0]}: there is no such file, and two saved pages are needed")
    complain("doctor", f"watching for {wait:g} s")
    return from_url(sources[0], wait)


def _is_path(source: str) -> bool:
    """Whether it is meant as a file, though it is not there: no address looks like that."""
    if ":" in source:
        return False
    return source.startswith((".", "/", "~")) or Path(source).suffix in _SUFFIXES
