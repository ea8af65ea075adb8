"""``kvlens simulate --trace``: its arguments, its detectors and its progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlens.dashboard.sizing.arguments import positive, whole

USAGE = 2


def add(simulate: argparse.ArgumentParser) -> None:
    """Add what concerns traces."""
    traces = simulate.add_argument_group("real traffic instead of scenarios (docs/sizing.md)")
    traces.add_argument(
        "--trace", metavar="FILE", type=Path, help="a trace as `kvlens size` reads it"
    )
    traces.add_argument(
        "--layout",
        metavar="FILE",
        type=Path,
        help="scenario file whose layout and engine are taken (default: full attention)",
    )
    traces.add_argument("--speed", metavar="N", type=positive, help="times as fast (default: 1)")
    traces.add_argument("--requests", metavar="N", type=whole, help="only the first N")
    traces.add_argument("--block-tokens", metavar="N", type=whole, help="tokens of a trace block")
    traces.add_argument(
        "--max-output", metavar="N", type=whole, help="tokens generated at most (default: 16)"
    )


def run(options: argparse.Namespace) -> int:
    """Drive the trace; returns the exit code."""
    from kvlens.connector.simulation import traffic_command
    from kvlens.dashboard.detect.offline import Watch
    from kvlens.dashboard.detect.panel import all_detectors
    from kvlens.dashboard.settings import SettingsError, load_settings

    if options.scenarios:
        print(
            "kvlens simulate: --trace: takes no scenario; give the engine by --layout "
            f"{options.scenarios[0]}",
            file=sys.stderr,
        )
        return USAGE
    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"kvlens simulate: {error}", file=sys.stderr)
        return USAGE
    asked = traffic_command.Options(
        trace=options.trace,
        layout=options.layout,
        block_tokens=options.block_tokens,
        speed=options.speed or 1.0,
        requests=options.requests,
        max_output=options.max_output or 16,
        lookups=(options.lookup,) if options.lookup else traffic_command.MODES,
        json_path=options.json,
    )
    return traffic_command.run(asked, lambda: Watch(all_detectors(settings.thresholds)), _bar)


@contextmanager
def _bar(lookup: str, total: int | None) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(lookup, total=total)
        yield lambda: progress.advance(task)
