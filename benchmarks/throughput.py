"""Engine throughput: vLLM's own offloading connector against kvlens, on real servers.

All servers run at the same time and answer the same requests in short turns, so
that each ratio compares neighbours in time. CPU time is that of all processes of
a server: unlike throughput it hardly depends on what else the machine does, but
counts the drain thread, which has a core of its own wherever there is one. Prompts share prefixes
and overflow the GPU cache: what is served comes from local hits, from the tier
and from computing, as in production.
"""

from __future__ import annotations

import contextlib
import os
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

ROUNDS = 30
WARM_UP = 1
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"chunk_tokens": 512, "gpu_blocks": 96, "max_model_len": 2048},
    "demo": {"chunk_tokens": 512, "gpu_blocks": 96, "max_model_len": 2048},
}
REQUESTS = {"tiny": {1: 8, 16: 64}, "demo": {1: 2, 16: 16}}
"""Requests of one turn, by how many run at a time: a second or a few."""
PROMPT, OUTPUT, DOCUMENTS, SHARED = 600, 8, 12, 512
ARMS = {
    "stock": "OffloadingConnector",
    "control": "OffloadingConnector",
    "kvlens": "KVLensOffloadingConnector",
}
"""The control is stock as well: how far it is from stock is what this machine cannot tell.
kvlens is compared with the mean of both."""


def start(supervisor: Supervisor, arm: str, size: str, folder: Path) -> engine.EngineProcess:
    """Start one server."""
    options = engine.EngineOptions(
        python=sys.executable,
        model=folder / size,
        engine_id=f"{arm}-{size}",
        connector=ARMS[arm],
        arguments=("--max-num-seqs", "16"),
        **SIZES[size],
    )
    return engine.start(supervisor, options, folder / f"{arm}-{size}.log")


def cpu_seconds(group: int) -> float:
    """CPU time of all processes of a process group so far."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
                "model": engine.MODEL_NAME,
                "prompt": prompt,
                "max_tokens": OUTPUT,
                "temperature": 0,
                "ignore_eos": True,
            },
        ).raise_for_status()

    started = time.monotonic()
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(ask, batch))
    return len(batch) * (PROMPT + OUTPUT) / (time.monotonic() - started)


def measure(size: str, servers: dict[str, engine.EngineProcess], at_a_time: int) -> dict[str, Any]:
    """Medians of both arms, and the median ratio of neighbouring turns."""
    rates: dict[str, list[float]] = {arm: [] for arm in servers}
    cpu: dict[str, list[float]] = {arm: [] for arm in servers}
    with httpx.Client(timeout=300, trust_env=False) as client:
        for number in range(WARM_UP + ROUNDS):
            batch = prompts(size, 1000 * at_a_time + number, REQUESTS[size][at_a_time])
            arms = list(servers)
            first = number % len(arms)
            for arm in arms[first:] + arms[:first]:
                group = servers[arm].child.pid
                before = cpu_seconds(group)
                rate = turn(client, servers[arm].url, batch, at_a_time)
                if number >= WARM_UP:
                    rates[arm].append(rate)
                    cpu[arm].append(cpu_seconds(group) - before)
    stock = [(a + b) / 2 for a, b in zip(rates["stock"], rates["control"], strict=True)]
    ratios = [a / b for a, b in zip(rates["kvlens"], stock, strict=True)]
    controls = [a / b for a, b in zip(rates["control"], rates["stock"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    used = {arm: sum(seconds) for arm, seconds in cpu.items()}
    return {
        "model": size,
        "at_a_time": at_a_time,
        "stock_tokens_per_second": statistics.median(stock),
        "kvlens_tokens_per_second": statistics.median(rates["kvlens"]),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "control_ratio": statistics.median(controls),
        "cpu_ratio": used["kvlens"] / ((used["stock"] + used["control"]) / 2),
        "control_cpu_ratio": used["control"] / used["stock"],
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
                servers = {arm: start(supervisor, arm, size, folder) for arm in ARMS}
                for at_a_time in REQUESTS[size]:
                    rows.append(measure(size, servers, at_a_time))
                    print(f"bench: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
