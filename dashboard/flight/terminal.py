"""Text for terminals: widths, colours and characters that the other side can show."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final, TextIO

NARROWEST: Final = 80
CUT: Final = "~"
"""Stands for what was cut out of an id."""
_COLOURS: Final[Mapping[str, str]] = {
    "bad": "31",
    "warn": "33",
    "good": "32",
    "quiet": "",
    "strong": "1",
    "faint": "2",
}


class Terminal:
    """One output stream; columns are characters."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        tty = self._stream.isatty()
        self._coloured = tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.width = max(shutil.get_terminal_size((NARROWEST, 24)).columns, NARROWEST)

    def shows(self, text: str) -> bool:
        """Whether the stream's encoding has all of ``text``."""
        try:
            text.encode(self._stream.encoding or "ascii")
        except UnicodeError:
            return False
        return True

    def line(self, text: str = "") -> None:
        """Print one line; characters that the stream cannot show are replaced."""
        encoding = self._stream.encoding or "ascii"
        shown = text if self.shows(text) else text.encode(encoding, "replace").decode(encoding)
        self._stream.write(shown.rstrip() + "\n")

    def wrapped(self, label: str, text: str, indent: int) -> None:
        """Print a paragraph behind a label, ``indent`` columns wide."""
        for part in textwrap.wrap(safe(text), self.width - indent) or [""]:
            self.line(f"{label:<{indent}}{part}")
            label = ""

    def colour(self, text: str, tone: str) -> str:
        """``text`` in the colour of a tone (see ``web.words``), if this is a terminal."""
        code = _COLOURS.get(tone, "")
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured and code else text


def safe(text: str) -> str:
    """Text from outside, without characters that would act on a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Text from outside in exactly ``width`` columns; what is cut out of it is the middle."""
    text = safe(text)
    if len(text) > width:
        head = (width - 1) // 2
        text = f"{text[:head]}{CUT}{text[len(text) - (width - 1 - head) :]}"
    return text.rjust(width) if right else text.ljust(width)


def row(
    cells: Sequence[str],
    widths: Sequence[int],
    tones: Mapping[int, str] | None = None,
    terminal: Terminal | None = None,
) -> str:
    """One line of a table; a negative width aligns to the right, ``tones`` colour some cells."""
    fitted = [fit(cell, abs(w), right=w < 0) for cell, w in zip(cells, widths, strict=True)]
    if terminal is not None:
        for index, tone in (tones or {}).items():
            fitted[index] = terminal.colour(fitted[index], tone)
    return " ".join(fitted)
