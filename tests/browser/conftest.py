"""A real Chromium against a real dashboard; anything the browser complains about fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chromium import Complaints, executable, launched
from playwright.sync_api import Browser, BrowserContext, Page

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One per module: while Playwright is open, asyncio refuses to run in this thread."""
    path = executable()
    if path is None:
        pytest.skip("no chromium: apt-get install chromium, or set KVLENS_TEST_CHROMIUM")
    with launched(path) as browser:
        yield browser


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    with running(Settings(store=str(tmp_path / "kvlens.db"), port=0)) as url:
        yield url


@pytest.fixture
def ingest(dashboard: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=dashboard, timeout=10) as client:
        yield client


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    found = Complaints()
    yield found
    assert found.texts == []


@pytest.fixture
def context(chromium: Browser, dashboard: str) -> Iterator[BrowserContext]:
    opened = chromium.new_context(
        base_url=dashboard, viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
    )
    opened.set_default_timeout(10_000)
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, complaints: Complaints) -> Page:
    opened = context.new_page()
    complaints.watch(opened)
    return opened
