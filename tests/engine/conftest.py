from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvlens.dashboard.demo import engine

pytest.register_assert_rewrite("harness")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny hybrid model and its drafter."""
    folder = tmp_path_factory.mktemp("tiny-model")
    engine.write_model(sys.executable, folder, "tiny")
    return folder
