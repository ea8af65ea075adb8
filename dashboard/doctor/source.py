"""Where the doctor's pages come from: two files, or a server that is asked twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from kvlens.dashboard.model.scrape import Reading
from kvlens.dashboard.scrape.page import PageError, decode, parse
from kvlens.dashboard.scrape.reading import read
from kvlens.dashboard.scrape.targets import metrics_url
from kvlens.dashboard.scrape.window import Window

_MAX_BYTES: Final = 64 << 20
_TIMEOUT: Final = 10.0


class SourceError(ValueError):
    """Pages that cannot be had or read; the message says what to change."""


@dataclass(frozen=True)
class Pages:
    """What was read: texts for a bundle, windows per engine for the checks."""

    name: str
    """What to call it before others: no address, no path."""
    texts: Sequence[tuple[str, str]]
    """``(name, text)`` of each page."""
    windows: list[list[Window]]


def from_files(before: Path, after: Path) -> Pages:
    """Two saved pages, the earlier first; raises :class:`SourceError`."""
    texts = [_load(path) for path in (before, after)]
    first, last = (_readings(text, str(path)) for text, path in zip(texts, (before, after),
                                                                    strict=True))  # fmt: skip
    earlier = {_who(reading): reading for reading in first}
    windows = [[Window(earlier.get(_who(reading)), reading)] for reading in last]
    if not set(earlier) & set(map(_who, last)):
        raise SourceError(f"{before} and {after} are of different engines: save both from one")
    if any(_swapped(window) for (window,) in windows):
        raise SourceError(
            f"{after} was saved before {before}: give the earlier page first, then the later one"
        )
    return Pages("two saved pages", list(zip(("before", "after"), texts, strict=True)), windows)


def from_url(
    address: str, wait: float, sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Pages:  # fmt: skip
    """A server's page, now and ``wait`` seconds later; raises :class:`SourceError`.

    What counted since the server's start tells most; what happens while we wait
    shows how full the GPU cache is.
    """
    try:
        url = metrics_url(address)
    except ValueError as error:
        raise SourceError(str(error)) from error
    with httpx.Client(timeout=_TIMEOUT, trust_env=False, follow_redirects=False) as client:
        texts = [_fetch(client, url)]
        sleep(wait)
        texts.append(_fetch(client, url))
    first, last = (_readings(text, url) for text in texts)
    earlier = {_who(reading): reading for reading in first}
    windows = []
    for reading in last:
        before = earlier.get(_who(reading))
        up = None if reading.started_at is None else max(0.0, now() - reading.started_at)
        peak = max(
            (r.gpu_usage for r in (before, reading) if r is not None and r.gpu_usage is not None),
            default=None,
        )
        found = [Window(None, reading, up, peak)]
        if before is not None:
            found.append(Window(before, reading, wait, peak))
        windows.append(found)
    return Pages("a running server", list(zip(("before", "after"), texts, strict=True)), windows)


def _who(reading: Reading) -> tuple[str, str]:
    return reading.engine, reading.model


def _swapped(window: Window) -> bool:
    """Whether the pages are in the wrong order: no process begins, or counts, backwards.

    Without the time of its start a server may as well have started anew in between.
    """
    before, after = window.before, window.after
    if before is None or before.started_at is None or after.started_at is None:
        return False
    if abs(after.started_at - before.started_at) > 1.0:
        return after.started_at < before.started_at
    changes = [after.counters.get(name, 0.0) - value for name, value in before.counters.items()]
    return any(change < 0 for change in changes) and not any(change > 0 for change in changes)


def _load(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SourceError(f"{path} is larger than {_MAX_BYTES:,} bytes: no metrics page is")
        return decode(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _fetch(client: httpx.Client, url: str) -> str:
    try:
        with client.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise SourceError(
                    f"{url} answers with HTTP status {response.status_code}: give the address of "
                    "a vLLM server"
                )
            body = bytearray()
            for part in response.iter_bytes():
                body += part
                if len(body) > _MAX_BYTES:
                    raise SourceError(f"{url} answers with over {_MAX_BYTES:,} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"{url} cannot be read ({error}): is the server up?") from error
    return body.decode("utf-8", "replace")


def _readings(text: str, name: str) -> list[Reading]:
    try:
        readings = read(parse(text))
    except PageError as error:
        raise SourceError(f"{name}: {error}") from error
    if not readings:
        raise SourceError(
            f"{name} has no metrics of vLLM, nor of LMCache, SGLang or KVBM: save the /metrics "
            f"page of such a server"
        )
    return readings
