from __future__ import annotations

from collections.abc import Iterator

import pytest
from receiver import Receiver, receiving

from kvlens.dashboard.notify import sender


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other as in production, only faster."""
    monkeypatch.setattr(sender, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(sender, "_LONGEST_PAUSE", 0.05)
