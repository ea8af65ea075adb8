"""When vLLM's own search is used although another one was configured.

Either an operator asks for it, with a file whose path is in the configuration and
for as long as that file exists, or an invariant failed: then it is for good.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from time import monotonic

from kvlens.telemetry.semconv import Fallback

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""The operator's file is looked for at most this often."""


class StockFallback:
    """The switch back to vLLM's own search."""

    def __init__(self, path: str | None = None, clock: Callable[[], float] = monotonic) -> None:
        """Watch for ``path``, if there is one; ``clock`` counts seconds."""
        self._path = path
        self._clock = clock
        self._next_look = clock()
        self._present = False
        self._failed = False
        self.notify: Callable[[Fallback, bool, str], None] | None = None
        """Called when the state changes: reason, whether it holds now, and why."""

    def active(self) -> bool:
        """Whether vLLM's own search is to be used now."""
        if self._failed:
            return True
        if self._path is not None and self._clock() >= self._next_look:
            self._look(self._path)
        return self._present

    def fail(self, error: Exception) -> None:
        """Fall back for good, and say so once."""
        if self._failed:
            return
        self._failed = True
        text = f"{type(error).__name__}: {error}"
        logger.error(
            "kvlens: an invariant of the lookup failed (%s); vLLM's own lookup is used from now "
            "on, until the engine is restarted. Please report this.",
            text,
            exc_info=error,
        )
        self._tell(Fallback.INVARIANT, True, text)

    def _look(self, path: str) -> None:
        self._next_look = self._clock() + INTERVAL_S
        present = os.path.exists(path)
        if present == self._present:
            return
        self._present = present
        if present:
            text = f"{path} exists"
            logger.warning("kvlens: %s; vLLM's own lookup is used while it does", text)
        else:
            text = f"{path} is gone"
            logger.warning("kvlens: %s; the configured lookup is used again", text)
        self._tell(Fallback.OPERATOR, present, text)

    def _tell(self, reason: Fallback, active: bool, text: str) -> None:
        if self.notify is not None:
            self.notify(reason, active, text)
