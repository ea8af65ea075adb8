"""``kvlens demo``: the zero-hit defect and its correction on a real vLLM."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlens.dashboard.commands.arguments import DEFAULT_PORT, Commands, port
from kvlens.dashboard.commands.exits import Refusal


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    demo = commands.add_parser(
        "demo",
        help="show the zero-hit defect and its correction on a real vLLM",
        description="Serve the same traffic with a real vLLM twice, lookup as it is in that "
        "release, then corrected, with the dashboard beside it. Exit code 0 only if the defect "
        "was seen, explained and corrected.",
    )
    demo.add_argument("--json", metavar="FILE", type=Path, help="write the numbers to FILE")
    demo.add_argument("--no-serve", action="store_true", help="end the dashboard at the end")
    demo.add_argument("--port", type=port, default=DEFAULT_PORT, help="of the dashboard")
    demo.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="interpreter with vLLM 0.29.0 and kvlens (default: $KVLENS_DEMO_ENGINE_PYTHON, "
        "else .venv-affected/bin/python)",
    )
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what that vLLM runs on (default: %(default)s; docs/gpu.md)",
    )
    demo.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Play both arms; 0 if all was shown, 1 if something was not, 128 + a signal's number."""
    from kvlens.dashboard.demo.process import DemoError
    from kvlens.dashboard.demo.run import DemoOptions, run

    try:
        return run(
            DemoOptions(
                port=options.port,
                serve=not options.no_serve,
                json_path=options.json,
                engine_python=options.engine_python,
                device=options.device,
            )
        )
    except DemoError as error:
        raise Refusal(str(error)) from error
