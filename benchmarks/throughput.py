"""Engine throughput: vLLM's own offloading connector against kvlens, on real servers.

Both servers run at the same time and answer the same requests in turns of a few
seconds, so that each ratio compares neighbours in time. Prompts share prefixes
and overflow the GPU cache: what is served comes from local hits, from the tier
and from computing, as in production.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import Supervisor

ROUNDS = 8
WARM_UP = 2
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"chunk_tokens": 512, "gpu_blocks": 96, "max_model_len": 2048},
    "demo": {"chunk_tokens": 512, "gpu_blocks": 96, "max_model_len": 2048},
}
REQUESTS = {1: 6, 16: 48}
"""Requests of one turn, by how many run at a time."""
PROMPT, OUTPUT, DOCUMENTS, SHARED = 600, 16, 12, 512
ARMS = {"stock": "OffloadingConnector", "kvlens": "KVLensOffloadingConnector"}


def start(supervisor: Supervisor, arm: str, size: str, folder: Path) -> str:
    """Start one server; returns its URL."""
    options = engine.EngineOptions(
        python=sys.executable, model=folder / size, engine_id=f"{arm}-{size}",
        connector=ARMS[arm], arguments=("--max-num-seqs", "16"), **SIZES[size],
    )  # fmt: skip
    return engine.start(supervisor, options, folder / f"{arm}-{size}.log").url


def prompts(size: str, seed: int, count: int) -> list[list[int]]:
    """Prompts: one of a few documents, then something of its own."""
    rng, vocab = random.Random(seed), model.SIZES[size].vocab

    def words(source: random.Random, tokens: int) -> list[int]:
        return [source.randrange(model.FIRST_WORD, vocab) for _ in range(tokens)]

    return [
        words(random.Random(rng.randrange(DOCUMENTS)), SHARED) + words(rng, PROMPT - SHARED)
        for _ in range(count)
    ]


def turn(client: httpx.Client, url: str, batch: list[list[int]], at_a_time: int) -> float:
    """Answer a batch; tokens in and out per second."""

    def ask(prompt: list[int]) -> None:
        client.post(
            f"{url}/v1/completions",
            json={
                "model": engine.MODEL_NAME, "prompt": prompt, "max_tokens": OUTPUT,
                "temperature": 0, "ignore_eos": True,
            },
        ).raise_for_status()  # fmt: skip

    started = time.monotonic()
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(ask, batch))
    return len(batch) * (PROMPT + OUTPUT) / (time.monotonic() - started)


def measure(size: str, urls: dict[str, str], at_a_time: int) -> dict[str, Any]:
    """Medians of both arms, and the median ratio of neighbouring turns."""
    rates: dict[str, list[float]] = {arm: [] for arm in urls}
    with httpx.Client(timeout=300, trust_env=False) as client:
        for number in range(WARM_UP + ROUNDS):
            batch = prompts(size, 1000 * at_a_time + number, REQUESTS[at_a_time])
            arms = list(urls)[:: -1 if number % 2 else 1]
            for arm in arms:
                rate = turn(client, urls[arm], batch, at_a_time)
                if number >= WARM_UP:
                    rates[arm].append(rate)
    ratios = [k / s for k, s in zip(rates["kvlens"], rates["stock"], strict=True)]
    return {
        "model": size,
        "at_a_time": at_a_time,
        "stock_tokens_per_second": statistics.median(rates["stock"]),
        "kvlens_tokens_per_second": statistics.median(rates["kvlens"]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def run() -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in SIZES:
            engine.write_model(sys.executable, folder / size, size)
            with ExitStack() as stack:
                supervisor = stack.enter_context(Supervisor())
                urls = {arm: start(supervisor, arm, size, folder) for arm in ARMS}
                rows += [measure(size, urls, at_a_time) for at_a_time in REQUESTS]
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
