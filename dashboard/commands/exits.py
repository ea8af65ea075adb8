"""Exit codes of all commands, and the one way to refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

OK: Final = 0
CRITICAL: Final = 1
"""Something was found that must not wait."""
USAGE: Final = 2
"""Bad usage or input: nothing was done, or not all."""
INCONCLUSIVE: Final = 3
"""The canary could not make the server reload anything."""
INTERRUPTED: Final = 130


class Refusal(Exception):
    """A command cannot do what it was asked to; the message says what to change."""


def complain(command: str, message: str) -> None:
    """Tell whoever called ``command`` something that is not part of its output."""
    sys.stdout.flush()
    print(f"kvlens {command}: {message}", file=sys.stderr)


def write(option: str, path: Path, content: str) -> None:
    """Write what ``option`` asked for; raises :class:`Refusal` where that is not possible."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{option} {path} cannot be written: {error.strerror}") from error
