"""Waiting for a condition; how long that takes decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds until a condition counts as never coming true; waiting ends as soon as it does."""


def eventually(condition: Callable[[], T]) -> T:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value
