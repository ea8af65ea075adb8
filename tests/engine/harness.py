"""Real vLLM servers for tests: which engines there are, and one running server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlens.connector import versions
from kvlens.dashboard.demo import engine
from kvlens.dashboard.demo.model import FIRST_WORD
from kvlens.dashboard.demo.process import Supervisor
from kvlens.dashboard.demo.traffic import Traffic, TrafficClient
from kvlens.telemetry import semconv

ROOT = Path(__file__).resolve().parents[2]
SERVERS = [item.version for item in versions.SUPPORTED if item.level is versions.Level.SERVER]
ENVIRONMENTS = {item.environment: item.version for item in versions.SUPPORTED}
OLDEST, AFFECTED, NEWEST = SERVERS[0], ENVIRONMENTS[".venv-affected"], ENVIRONMENTS[".venv"]
FLUSH_SECONDS = 30.0
TINY_OPTIONS: dict[str, Any] = {"chunk_tokens": 512, "gpu_blocks": 64, "max_model_len": 2048}
"""For the tiny model: two prompts of 1,100 tokens fill the GPU cache."""


def python_of(version: str) -> str:
    """Interpreter of an engine: this one's environment, the affected one, or one laid over."""
    if version == NEWEST:
        return sys.executable
    if version == AFFECTED:
        return engine.find_python()
    folder = next(item.folder for item in versions.SUPPORTED if item.version == version)
    python = ROOT / folder / "bin" / "python"
    if not python.exists():
        pytest.skip(f"vLLM {version} is not there: run `make engines`")
    return str(python)


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    client: TrafficClient
    log: Path

    def complete(self, prompt: list[int], output_tokens: int, request_id: str) -> str:
        """Greedy completion of token ids."""
        return self.client.complete(prompt, output_tokens, request_id)[1]

    def play(self, plan: Traffic, prefix: str = "test") -> list[str]:
        """Texts of all the plan's requests, in order."""
        return [answer.text for answer in self.client.play(plan, prefix)]

    def metric(self, sample: str, **labels: str) -> float | None:
        """Sum of a ``/metrics`` sample over the label sets that match, None if there is none."""
        page = httpx.get(f"{self.url}/metrics", trust_env=False).raise_for_status().text
        values = [
            found.value
            for family in text_string_to_metric_families(page)
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        ]
        return sum(values) if values else None

    def flush(self, requests: int) -> None:
        """Wait until kvlens has accounted for ``requests`` finished requests."""
        name = semconv.REQUESTS.exposed_name
        self.flush_until(lambda: (self.metric(name) or 0) >= requests)

    def flush_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what ``/metrics`` will say.

        Stats leave the engine with its steps only, so one-token requests make some.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while not ready():
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-2000:]
            self.complete([FIRST_WORD], 1, "flush")

    def log_lines(self, text: str) -> list[str]:
        """Lines of the server's log that contain ``text``."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]


@contextmanager
def serve(
    version: str, model: Path, folder: Path, kvlens: dict[str, Any], **options: Any
) -> Iterator[Server]:
    """Run a server; ``kvlens`` is the connector's section, ``options`` of ``EngineOptions``."""
    settings = engine.EngineOptions(
        python=python_of(version),
        model=model,
        engine_id=options.pop("engine_id", "test"),
        kvlens=kvlens,
        **{**TINY_OPTIONS, **options},
    )
    # pytest deals with signals itself.
    with Supervisor(signals=()) as supervisor:
        running = engine.start(supervisor, settings, folder / "server.log")
        client = TrafficClient(running.url, engine.MODEL_NAME)
        try:
            yield Server(running.url, client, running.child.log)
        finally:
            client.close()
