from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.sqlite import SqliteStore


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=str(tmp_path / "kvlens.db"), port=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(str(tmp_path / "store.db"))
    yield opened
    opened.close()


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    """A real server on a thread, and a client of it."""
    with running(settings) as url, httpx.Client(base_url=url, timeout=10) as opened:
        yield opened
