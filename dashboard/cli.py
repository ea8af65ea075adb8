"""The ``kvlens`` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlens.telemetry import __version__

DEFAULT_PORT = 8790
OK, USAGE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code (0 fine, 1 a critical finding, 2 bad usage)."""
    options = _parser().parse_args(argv)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlens",
        description="See where KV-offload hits die in vLLM, and stop them from dying.",
    )
    parser.add_argument("--version", action="version", version=f"kvlens {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve", help="run the dashboard", description="Receive, store and show telemetry."
    )
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=_port, help=f"default {DEFAULT_PORT}; 0 picks a free one")
    serve.add_argument("--store", metavar="PATH", help="SQLite file (default: user data folder)")
    serve.add_argument("--read-token", metavar="TOKEN", help="needed for pages and the API")
    serve.add_argument("--ingest-token", metavar="TOKEN", help="needed to send telemetry")
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo",
        help="show the zero-hit defect and its correction on a real vLLM",
        description="Serve the same traffic with a real vLLM twice, lookup as it is in that "
        "release, then corrected, with the dashboard beside it. Exit code 0 only if the defect "
        "was seen, explained and corrected.",
    )
    demo.add_argument("--json", metavar="FILE", type=Path, help="write the numbers to FILE")
    demo.add_argument("--no-serve", action="store_true", help="end the dashboard at the end")
    demo.add_argument("--port", type=_port, default=DEFAULT_PORT, help="of the dashboard")
    demo.add_argument(
        "--engine-python",
        metavar="PYTHON",
        help="interpreter with vLLM 0.29.0 and kvlens (default: $KVLENS_DEMO_ENGINE_PYTHON, "
        "else .venv-affected/bin/python)",
    )
    demo.set_defaults(run=_demo)
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return port


def _serve(options: argparse.Namespace) -> int:
    from kvlens.dashboard import serve
    from kvlens.dashboard.settings import SettingsError, load_settings
    from kvlens.dashboard.store.base import StoreError

    try:
        settings = load_settings(
            host=options.host,
            port=options.port,
            store=options.store,
            read_token=options.read_token,
            ingest_token=options.ingest_token,
        )
        # uvicorn shuts down in order on Ctrl-C, then raises it anew.
        with contextlib.suppress(KeyboardInterrupt):
            serve.run(settings)
    except (SettingsError, serve.ServeError, StoreError) as error:
        print(f"kvlens serve: {error}", file=sys.stderr)
        return USAGE
    return OK


def _demo(options: argparse.Namespace) -> int:
    from kvlens.dashboard.demo.run import DemoOptions, run

    return run(
        DemoOptions(
            port=options.port,
            serve=not options.no_serve,
            json_path=options.json,
            engine_python=options.engine_python,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
