"""Kinds of arguments that commands share; each refuses with what would be right."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object

DEFAULT_PORT = 8790
LOOKUPS = ("corrected", "exact", "stock")


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def count(text: str) -> int:
    """A whole number from 1."""
    number = natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return number


def port(text: str) -> int:
    """A port; 0 for any free one."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return number


def seconds(text: str) -> float:
    """A length of time, at most a day."""
    try:
        length = float(text)
    except ValueError:
        length = -1.0
    if not 0 <= length <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds (0 to 86400)")
    return length
