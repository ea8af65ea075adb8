"""``kvlens doctor URL | BEFORE.txt AFTER.txt``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlens.dashboard.doctor.bundle import bundle
from kvlens.dashboard.doctor.report import Report, diagnose, text
from kvlens.dashboard.doctor.source import Pages, SourceError, from_files, from_url
from kvlens.dashboard.settings import SettingsError, load_settings

OK, CRITICAL, USAGE = 0, 1, 2
PAGES: Final = 2
_SUFFIXES: Final = (".txt", ".prom", ".metrics", ".log", ".json", ".gz")


def run(
    sources: Sequence[str], wait: float, json_path: Path | None, bundle_path: Path | None
) -> int:
    """Examine, print, write what was asked for; returns the exit code."""
    try:
        settings = load_settings()
        pages = _pages(sources, wait)
        report = Report(
            pages.name,
            [
                diagnose(windows, settings.thresholds(windows[0].after.model))
                for windows in pages.windows
            ],
        )
        if json_path is not None:
            _write(json_path, json.dumps(report.as_dict(), indent=2) + "\n")
        if bundle_path is not None:
            _write(bundle_path, bundle(report, pages.texts) + "\n")
    except (SourceError, SettingsError) as error:
        print(f"kvlens doctor: {error}", file=sys.stderr)
        return USAGE
    print(text(report))
    return CRITICAL if report.critical else OK


def _pages(sources: Sequence[str], wait: float) -> Pages:
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
    print(f"kvlens doctor: watching for {wait:g} s", file=sys.stderr)
    return from_url(sources[0], wait)


def _is_path(source: str) -> bool:
    """Whether it is meant as a file, though it is not there: no address looks like that."""
    if ":" in source:
        return False
    return source.startswith((".", "/", "~")) or Path(source).suffix in _SUFFIXES


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error.strerror}") from error
