"""Reads the targets' pages at their times, and hands what they say to the writer.

Runs on the application's event loop; pages are parsed on threads. A target
that hangs costs its own time only, one that answers too much is cut off.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import httpx
import msgspec

from kvlens.dashboard.ingest.writer import Busy, Writer
from kvlens.dashboard.model.batch import Batch
from kvlens.dashboard.model.scrape import Reading, Scrape
from kvlens.dashboard.scrape.page import PageError
from kvlens.dashboard.scrape.reading import read_page
from kvlens.dashboard.scrape.targets import (
    Target,
    TargetError,
    discovered,
    distinct,
    files,
    from_file,
    target_of,
)
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import StoreError

OK: Final = "ok"
FAILED: Final = "failed"
DROPPED: Final = "dropped"
_ACCEPT: Final = "text/plain;version=0.0.4"
_MAX_SD_BYTES: Final = 8 << 20
_logger = logging.getLogger(__name__)


class TargetStatus(msgspec.Struct, kw_only=True):
    """What is known of one target, for people."""

    target: str
    url: str
    state: str = "pending"
    """``pending``, ``up``, ``down``, or ``not_vllm`` (it answers, but as no known engine)."""
    last_scrape: float | None = None
    seconds: float | None = None
    error: str = ""
    engines: int = 0
    instrumented: bool = False


class FetchError(RuntimeError):
    """A page that could not be had; the message says why."""


class Sleep(Protocol):
    """``asyncio.sleep``; tests bring their own."""

    def __call__(self, seconds: float, /) -> Awaitable[None]:
        """Wait."""


class Scraper:
    """All targets of one dashboard."""

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        metrics: SelfMetrics,
        sleep: Sleep = asyncio.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._metrics = metrics
        self._sleep = sleep
        self._now = now
        self._static = distinct(map(target_of, settings.scrape))
        self._found: dict[str, list[Target]] = {}
        """Targets by the source that named them; a source that fails keeps its last ones."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._status: dict[str, TargetStatus] = {}
        self._slots = asyncio.Semaphore(settings.scrape_concurrency)
        self._client: httpx.AsyncClient | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._warned: set[str] = set()

    @property
    def status(self) -> list[TargetStatus]:
        """All targets, by name."""
        return sorted(self._status.values(), key=lambda status: (status.target, status.url))

    def start(self) -> None:
        """Begin; call on the event loop. Without targets nothing runs."""
        sources = self._settings.scrape_file or self._settings.scrape_http_sd
        if not self._static and not sources:
            return
        self._client = httpx.AsyncClient(
            timeout=self._settings.scrape_timeout_seconds,
            follow_redirects=False,
            trust_env=False,
            headers={"accept": _ACCEPT, "user-agent": "kvlens"},
        )
        self._refresher = asyncio.create_task(self._refresh(), name="kvlens-scrape-targets")

    async def stop(self) -> None:
        """End all scrapes."""
        tasks = [*self._tasks.values(), *([self._refresher] if self._refresher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    # --- which targets ----------------------------------------------------------

    async def _refresh(self) -> None:
        while True:
            await self._discover()
            targets = {
                **self._static,
                **distinct(t for found in self._found.values() for t in found),
            }
            for url in self._tasks.keys() - targets.keys():
                await self._drop(url)
            for url, target in targets.items():
                if url not in self._tasks:
                    self._status[url] = TargetStatus(target=target.name, url=url)
                    self._tasks[url] = asyncio.create_task(self._follow(target))
            self._count()
            await self._sleep(self._settings.scrape_refresh_seconds)

    async def _discover(self) -> None:
        for source, read in (
            (self._settings.scrape_file, self._read_file),
            (self._settings.scrape_http_sd, self._read_http),
        ):
            if source is None:
                continue
            try:
                self._found[source] = await read(source)
                self._warned.discard(source)
            except (TargetError, FetchError, OSError) as error:
                self._metrics.scrapes.labels(FAILED).inc()
                if source not in self._warned:  # once per outage
                    self._warned.add(source)
                    _logger.warning("scrape targets are as before: %s", error)

    async def _read_file(self, pattern: str) -> list[Target]:
        return await asyncio.to_thread(_read_files, pattern)

    async def _read_http(self, url: str) -> list[Target]:
        return discovered(await self._fetch(url, _MAX_SD_BYTES), url)

    async def _drop(self, url: str) -> None:
        task, status = self._tasks.pop(url), self._status.pop(url)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._hand_over(Scrape(target=status.target, time=self._now(), gone=True))

    # --- one target -------------------------------------------------------------

    async def _follow(self, target: Target) -> None:
        """Scrape one target for good, at a phase of its own so that they spread."""
        interval = self._settings.scrape_interval_seconds
        await self._sleep(_phase(target.url) * min(interval, 1.0))
        while True:
            began = time.monotonic()
            try:
                async with self._slots:
                    await self._scrape(target)
            except Exception:
                self._metrics.errors.inc()
                _logger.exception("a scrape of %s failed in an unforeseen way", target.name)
            await self._sleep(max(0.0, interval - (time.monotonic() - began)))

    async def _scrape(self, target: Target) -> None:
        status = self._status[target.url]
        began, at = time.monotonic(), self._now()
        readings: list[Reading] = []
        error = ""
        try:
            page = await self._fetch(target.url, self._settings.scrape_max_bytes)
            readings = await asyncio.to_thread(_read, page)
        except (FetchError, PageError) as problem:
            error = str(problem)
        status.last_scrape, status.seconds = at, time.monotonic() - began
        status.error = error
        status.state = "down" if error else "up" if readings else "not_vllm"
        status.engines = len(readings)
        status.instrumented = any(reading.instrumented for reading in readings)
        self._count()
        scrape = Scrape(target=target.name, time=at, readings=readings, error=error)
        result = FAILED if error else OK
        self._metrics.scrapes.labels(result if await self._hand_over(scrape) else DROPPED).inc()

    async def _hand_over(self, scrape: Scrape) -> bool:
        """Give a scrape to the detectors; False when the writer is too busy, the next will do."""
        try:
            with self._writer.slot():
                await asyncio.wrap_future(self._writer.submit(Batch(scrapes=(scrape,))))
        except (Busy, StoreError):
            return False
        return True

    async def _fetch(self, url: str, limit: int) -> bytes:
        """Body of a page; raises :class:`FetchError`. The timeout is for the whole of it."""
        assert self._client is not None
        try:
            return await asyncio.wait_for(
                self._body(url, limit), self._settings.scrape_timeout_seconds
            )
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise FetchError(
                f"no answer within {self._settings.scrape_timeout_seconds:g} s"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchError(f"{type(error).__name__}: {error}") from error

    async def _body(self, url: str, limit: int) -> bytes:
        assert self._client is not None
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise FetchError(f"HTTP status {response.status_code}")
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > limit:
                    raise FetchError(f"the page is larger than {limit:,} bytes")
            return bytes(body)

    def _count(self) -> None:
        for state in ("pending", "up", "down", "not_vllm"):
            number = sum(status.state == state for status in self._status.values())
            self._metrics.scrape_targets.labels(state).set(number)


def _read_files(pattern: str) -> list[Target]:
    return [target for path in files(pattern) for target in from_file(path)]


def _read(page: bytes) -> list[Reading]:
    return read_page(page.decode("utf-8", "replace"))


def _phase(url: str) -> float:
    """A number from 0 to 1 of its own for each target."""
    return int.from_bytes(hashlib.sha256(url.encode()).digest()[:4], "big") / 2**32
