from __future__ import annotations

import logging

import pytest

from kvlens.connector import logs


@pytest.fixture(autouse=True)
def _logs_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector joins vLLM's log for the whole process; ``caplog`` would see nothing then."""
    monkeypatch.setattr(logs, "join_vllm", lambda: None)
    monkeypatch.setattr(logging.getLogger("kvlens"), "propagate", True)
