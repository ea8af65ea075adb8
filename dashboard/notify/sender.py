"""The thread that talks to one receiver, so that one that hangs holds up nothing else."""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from typing import Final

import httpx

from kvlens.dashboard.selfmetrics import NotifyMetrics

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_logger = logging.getLogger(__name__)


class Retry(Exception):
    """It may work later; ``after`` are the seconds that the receiver asked for."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Sender(ABC):
    """Runs :meth:`work` when there is some, again after a pause when it failed."""

    every: float | None = None
    """Seconds after which there is work anyway."""

    def __init__(self, url: str, client: httpx.Client, metrics: NotifyMetrics) -> None:
        self._url = url
        self._client = client
        self._metrics = metrics
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlens-notify", daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Send what there is; raises :class:`Retry`."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Notifications that are still to be sent."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end; what is waiting gets one more try."""
        self._end.set()
        self._wake.set()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, at most ``timeout`` seconds."""
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._client.close()

    def _run(self) -> None:
        failures, ending = 0, False
        while not ending:
            self._wake.wait(self.every)
            self._wake.clear()
            ending = self._end.is_set()
            pause = self._try(failures)
            failures = failures + 1 if pause is not None else 0
            if pause is not None:
                # New work does not cut this short: a receiver in trouble is left alone.
                self._end.wait(pause)
                self._wake.set()

    def _try(self, failures: int) -> float | None:
        """Work once; seconds to pause if it failed."""
        try:
            self.work()
        except Retry as error:
            self._metrics.retried.inc()
            self._report(failures, str(error))
            backoff = min(_FIRST_PAUSE * 2.0 ** min(failures, 10), _LONGEST_PAUSE)
            return max(backoff * random.uniform(0.5, 1.0), error.after or 0.0)
        except Exception:
            self._metrics.failed.inc()
            _logger.exception("a notification failed; the next ones go on")
            return _LONGEST_PAUSE
        if failures:
            _logger.info("notifications to %s are accepted again", self._name())
        return None

    def _report(self, failures: int, reason: str) -> None:
        """Say it once per outage, not at each attempt."""
        if not failures:
            _logger.warning("notifications to %s fail, will try again: %s", self._name(), reason)

    def _name(self) -> str:
        """Host and path: a URL may hold a password or a key in its query."""
        url = httpx.URL(self._url)
        return f"{url.host}{url.path}"


def post(client: httpx.Client, url: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    """POST JSON; raises :class:`Retry` if it may work later. Redirects are not followed."""
    try:
        answer = client.post(
            url, content=body, headers={"Content-Type": "application/json", **headers}
        )
    except httpx.HTTPError as error:
        raise Retry(f"{type(error).__name__}: {error}") from error
    if answer.status_code == 429 or answer.status_code >= 500:
        after = answer.headers.get("retry-after", "")
        seconds = min(float(after), 3600.0) if after.isdecimal() else None
        raise Retry(f"HTTP {answer.status_code}", seconds)
    return answer
