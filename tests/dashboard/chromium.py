"""Starting a real Chromium, and hearing what it complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Complaints:
    """What went wrong in the browser: errors, blocked loads, failed requests."""

    texts: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.texts.append(f"page error: {error}"))
        page.on("response", lambda r: self._status(r.status, r.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.texts.append(f"{message.type}: {message.text}")

    def _status(self, status: int, url: str) -> None:
        if status >= 400:
            self.texts.append(f"{status} {url}")


def executable() -> str | None:
    """Path of the browser: ``KVLENS_TEST_CHROMIUM``, or ``chromium`` on the path."""
    return os.environ.get("KVLENS_TEST_CHROMIUM") or shutil.which("chromium")


@contextmanager
def launched(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()
