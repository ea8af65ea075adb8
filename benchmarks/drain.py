"""What the drain thread costs: facts per second, memory, and the GIL it takes.

Facts are those of an engine with three groups that serves prompts of 4,096
tokens (256 chunks), half of them from the tier. The thread whose GIL is taken
appends these facts and otherwise computes without a pause, which is worse than
any engine: while a model runs, vLLM's scheduler waits and the GIL is free.
"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from kvlens.telemetry import facts
from kvlens.telemetry.emit.prometheus import StatsSink
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import EngineInfo, GroupLayout, Layout

CHUNK, CHUNKS = 16, 256
TOKENS = CHUNK * CHUNKS + 1
REQUESTS = 400
RESIDENT = 1_000_000
SECONDS = 5
KINDS = ("full_attention", "sliding_window", "mamba")


def engine(capacity: int) -> EngineInfo:
    """Three groups with equal chunks."""
    groups = [
        GroupLayout(
            kv_group=index,
            group_kind=kind,
            tokens_per_block=CHUNK,
            tokens_per_chunk=CHUNK,
            window=128 if kind == "sliding_window" else None,
        )
        for index, kind in enumerate(KINDS)
    ]
    return EngineInfo(
        engine_id="bench",
        incarnation_id="bench",
        model="bench",
        started_at=0.0,
        kvlens_version="bench",
        vllm_version="bench",
        capacity_chunks=capacity,
        layout=Layout(groups=groups, tokens_per_hash=CHUNK),
    )


def keys_of(prompt: int) -> list[list[bytes]]:
    """Offload keys per group, as vLLM makes them: a hash and the group."""
    hashes = [hashlib.sha256(f"{prompt}/{chunk}".encode()).digest() for chunk in range(CHUNKS)]
    return [[h + group.to_bytes(4, "big") for h in hashes] for group in range(len(KINDS))]


def life(number: int) -> list[tuple[Any, ...]]:
    """Facts of one request; every second one repeats the prompt before and is served."""
    now, name, hit = time.monotonic_ns(), f"r{number}", bool(number % 2)
    keys = keys_of(number // 2)
    pairs = [(names, len(names)) for names in keys]
    every = [key for names in keys for key in names]
    served = CHUNK * CHUNKS if hit else 0
    found = [(names[0], CHUNKS, CHUNKS if hit else 0, None) for names in keys[: 3 if hit else 1]]
    said: list[tuple[Any, ...]] = [
        (facts.ADDED, now, name, time.time(), TOKENS, None, False, None),
        (facts.LOOKUP, now, name, now, 0, TOKENS, served, found, pairs, False, None, None),
        (facts.ADMITTED, now, name, served, number if hit else None, set(every) if hit else ()),
        (facts.STARTED, now, [(name, served)]),
    ]
    if hit:
        said.append((facts.LOADED, now, said[2][5]))
    else:
        job = set(every)
        said += [
            (facts.STEP, now, 0.1, TOKENS - 1),
            (facts.OFFERED, now, name, every, every, []),
            (facts.STORE_JOB, now, name, number, job),
            (facts.STORED, now, job, True),
        ]
    said.append((facts.FINISHED, now, name, "stop", TOKENS + 16, TOKENS + 15, pairs))
    return said


def facts_per_second() -> dict[str, float]:
    """How fast facts become records when nothing else runs."""
    said = [fact for number in range(REQUESTS) for fact in life(number)]
    stats = StatsSink(engine(10_000_000))
    recorder = Recorder(engine(10_000_000), stats, queue_size=10_000_000)
    for fact in said:
        recorder.append(fact)
    started, cpu = time.perf_counter(), time.thread_time()
    recorder.flush()
    wall, cpu = time.perf_counter() - started, time.thread_time() - cpu
    return {
        "facts_per_second": len(said) / wall,
        "requests_per_second": REQUESTS / wall,
        "cpu_us_per_request": cpu / REQUESTS * 1e6,
    }


def gil(requests_per_second: float) -> dict[str, float]:
    """What a computing thread loses to the drain thread at a rate of requests.

    ``share`` is the drain thread's CPU time per second, an upper bound: all of
    it that is Python holds the GIL. The waits are those of the computing thread,
    which holds the GIL for about 20 µs at a time, with and without it.
    """
    lives = [life(number) for number in range(int(SECONDS * requests_per_second))]
    _, alone = _compute(lives, [], requests_per_second)
    recorder = Recorder(engine(10_000_000), StatsSink(engine(10_000_000)))
    recorder.start()
    share, beside = _compute(lives, recorder, requests_per_second)
    recorder.close()
    return {
        "requests_per_second": requests_per_second,
        "share": share,
        "p99_us_alone": quantiles(alone, n=100)[98] / 1000,
        "p99_us_beside": quantiles(beside, n=100)[98] / 1000,
    }


def _compute(lives: list[Any], sink: Any, rate: float) -> tuple[float, list[int]]:
    """Compute and append facts; returns the drain thread's share and the time of each unit."""
    units: list[int] = []
    drain = next((t for t in threading.enumerate() if t.name == "kvlens-drain"), None)
    clock = time.pthread_getcpuclockid(drain.ident) if drain and drain.ident else None
    gc.collect()
    used = time.clock_gettime(clock) if clock is not None else 0.0
    started = time.monotonic()
    for number, said in enumerate(lives):
        for fact in said:
            sink.append(fact)
        while time.monotonic() < started + (number + 1) / rate:
            before = time.perf_counter_ns()
            sum(range(2000))
            units.append(time.perf_counter_ns() - before)
    used = time.clock_gettime(clock) - used if clock is not None else 0.0
    return used / (time.monotonic() - started), units


def memory() -> dict[str, float]:
    """Megabytes that a million resident chunks add, in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "memory"], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(run.stdout)
    return result


def _memory() -> dict[str, float]:
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(RESIDENT)]
    info = engine(RESIDENT)
    recorder = Recorder(info, StatsSink(info))
    gc.collect()
    before = _resident_bytes()
    for start in range(0, RESIDENT, 1000):
        some = keys[start : start + 1000]
        recorder.append((facts.OFFERED, 0, "r", some, some, []))
        recorder.append((facts.STORED, 0, some, True))
        recorder.drain()
    return {"resident_chunks": RESIDENT, "megabytes": (_resident_bytes() - before) / 1e6}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run() -> dict[str, Any]:
    """All of it."""
    return {
        "drain": facts_per_second(),
        "gil": [gil(rate) for rate in (2, 10, 50)],
        "memory": memory(),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        print(json.dumps(_memory()))
    else:
        print(json.dumps(run(), indent=1))
