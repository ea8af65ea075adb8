"""The ``kvlens`` command: which commands there are, and how each one ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvlens.dashboard.commands import (
    canary,
    compat,
    demo,
    doctor,
    inspect,
    replay,
    rules,
    serve,
    simulate,
)
from kvlens.dashboard.commands.exits import OK, USAGE, Refusal, complain
from kvlens.dashboard.sizing import arguments as size
from kvlens.telemetry import __version__

COMMANDS = (serve, demo, compat, simulate, size, inspect, replay, doctor, canary, rules)
"""In the order of ``kvlens --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 fine, 1 a critical finding, 2 bad usage)."""
    options = _parser().parse_args(argv)
    if argv is None and options.fixed_hashes:
        _fix_hashes()
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except Refusal as refusal:
        complain(options.command, str(refusal))
        return USAGE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "kvlens":
            raise
        print(
            f"kvlens: this command needs {error.name}, which is not installed here: "
            f"pip install 'kvlens[dashboard]'",
            file=sys.stderr,
        )
        return USAGE
    return code


def _fix_hashes() -> None:
    """Begin again with the same hashes in every run."""
    if "PYTHONHASHSEED" not in os.environ:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlens",
        description="See where KV-offload hits die in vLLM, and stop them from dying.",
    )
    parser.add_argument("--version", action="version", version=f"kvlens {__version__}")
    parser.set_defaults(fixed_hashes=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
