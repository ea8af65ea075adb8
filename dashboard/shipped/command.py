"""``kvlens rules``: rules and boards for people who have no checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from kvlens.dashboard import shipped

OK, USAGE = 0, 2


def run(folder: Path, dashboard: str | None) -> int:
    """Write all files to ``folder`` and say what to do with them; returns the exit code."""
    runbooks = None
    if dashboard is not None:
        parts = urlsplit(dashboard)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return _refuse(
                f"--dashboard {dashboard!r} is no address: give one such as http://127.0.0.1:8790"
            )
        runbooks = f"{dashboard.rstrip('/')}/runbooks"
    rules, boards = shipped.rule_files(runbooks), shipped.board_files(dashboard)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**rules, **boards}.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        return _refuse(f"{error.filename or folder}: {error.strerror}")
    print("Prometheus, in prometheus.yml:")
    print(f"  rule_files: [{', '.join(str(folder.absolute() / name) for name in rules)}]")
    print("Grafana, to be imported:")
    for name in boards:
        print(f"  {folder.absolute() / name}")
    return OK


def _refuse(message: str) -> int:
    print(f"kvlens rules: {message}", file=sys.stderr)
    return USAGE
