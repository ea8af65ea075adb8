"""``kvlens rules``: rules and boards for people who have no checkout."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from kvlens.dashboard.commands.arguments import Commands
from kvlens.dashboard.commands.exits import OK, Refusal


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    rules = commands.add_parser(
        "rules",
        help="write the Prometheus rules and Grafana boards to a folder",
        description="Write kvlens' recording rules, alerts and Grafana boards to FOLDER, over "
        "older ones of the same names.",
    )
    rules.add_argument("folder", metavar="FOLDER", type=Path, help="made if it is not there")
    rules.add_argument(
        "--dashboard",
        metavar="URL",
        help="address of `kvlens serve`: alerts lead to the runbooks there, boards to its requests",
    )
    rules.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write all files and say what to do with them."""
    from kvlens.dashboard import shipped

    folder: Path = options.folder
    dashboard: str | None = options.dashboard
    runbooks = None
    if dashboard is not None:
        parts = urlsplit(dashboard)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refusal(
                f"--dashboard {dashboard!r} is no address: give one such as http://127.0.0.1:8790"
            )
        runbooks = f"{dashboard.rstrip('/')}/runbooks"
    rules, boards = shipped.rule_files(runbooks), shipped.board_files(dashboard)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**rules, **boards}.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{error.filename or folder}: {error.strerror}") from error
    print("Prometheus, in prometheus.yml:")
    print(f"  rule_files: [{', '.join(str(folder.absolute() / name) for name in rules)}]")
    print("Grafana, to be imported:")
    for name in boards:
        print(f"  {folder.absolute() / name}")
    return OK
