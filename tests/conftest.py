"""Shared by all tests: which of them an environment can run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvlens.connector import logs

CONNECTOR_TESTS = Path(__file__).parent / "connector"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--connector-only",
        action="store_true",
        help="collect tests/connector alone: for an environment with another engine and no tools",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--connector-only"):
        return None
    on_the_way = collection_path in CONNECTOR_TESTS.parents
    inside = collection_path == CONNECTOR_TESTS or CONNECTOR_TESTS in collection_path.parents
    return None if on_the_way or inside else True


@pytest.fixture(autouse=True)
def _settings_are_left_as_found() -> Iterator[None]:
    """Servers that later tests start inherit what a test leaves in the environment.

    vLLM's import itself sets variables that tune libraries; those may stay.
    """
    before = _settings()
    yield
    assert _settings() == before


@pytest.fixture(autouse=True)
def _logs_stay_ours() -> Iterator[None]:
    """A connector joins vLLM's log for the whole process; ``caplog`` would see nothing then."""
    ours = logging.getLogger("kvlens")
    before = (ours.level, ours.propagate, list(ours.handlers))
    with mock.patch.object(logs, "join_vllm"):
        yield
    assert (ours.level, ours.propagate, list(ours.handlers)) == before


def _settings() -> dict[str, str]:
    ours = ("HF_", "KVLENS_", "OTEL_", "PROMETHEUS_", "PYTHON", "VLLM_LOGGING_")
    return {name: value for name, value in os.environ.items() if name.startswith(ours)}
