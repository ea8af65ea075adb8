"""Where errors of ours end: counted, logged once per kind, and nothing else stops for them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from kvlens.telemetry import semconv
from kvlens.telemetry.sinks import MetricSink

logger = logging.getLogger(__name__)

_MAX_LOGGED_KINDS = 64


def raise_errors() -> bool:
    """Whether errors of ours are raised: under pytest they are defects."""
    return "pytest" in sys.modules


class Guard:
    """Runs calls of ours; belongs to the drain thread."""

    def __init__(self, metrics: MetricSink) -> None:
        self._metrics = metrics
        self._logged: set[str] = set()

    def __call__(self, call: Callable[..., object], *args: Any) -> None:
        """Call, and contain whatever is raised."""
        try:
            call(*args)
        except Exception as error:
            if raise_errors():
                raise
            name = getattr(call, "__qualname__", repr(call))
            self.note(f"{type(error).__name__} in {name}", str(error), exc_info=True)

    def note(self, kind: str, text: str, exc_info: bool = False) -> None:
        """Count an error that was contained; log it if it is the first of its kind."""
        try:
            self._metrics.count(semconv.OBSERVER_ERRORS)
        except Exception:  # noqa: BLE001 - if counting is what fails, the log line is all there is
            exc_info = True
        if kind not in self._logged and len(self._logged) < _MAX_LOGGED_KINDS:
            self._logged.add(kind)
            logger.error(
                "kvlens: %s: %s; serving is not affected, more of this kind are only counted",
                kind,
                text,
                exc_info=exc_info,
            )
