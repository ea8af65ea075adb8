"""What a correction changes of a call, off for good once it fails: stock answers then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvlens.connector.observer import raise_errors

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Switch:
    """Guards the part of a correction that runs while serving."""

    def __init__(self, name: str) -> None:
        """``name`` is the correction's."""
        self.name = name
        self.off = False

    def __call__(self, scheduler: Any, change: Callable[[], T], stock: T) -> T:
        """``change()``, or ``stock`` where that fails or has failed before."""
        if self.off:
            return stock
        try:
            return change()
        except Exception as error:
            if raise_errors():
                raise
            self.off = True
            logger.exception(
                "kvlens correction %s failed and is off until the engine restarts; vLLM's own "
                "code answers",
                self.name,
            )
            observer = getattr(scheduler, "observer", None)
            if observer is not None:
                observer.failed(self.name, error)
            return stock
