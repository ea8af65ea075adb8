"""What observing adds to one lookup on vLLM's scheduler thread.

Every sample is one fresh request, whole prompt resident, looked up on four
schedulers of the same vLLM in random order: vLLM's own class, and kvlens'
with telemetry off, on, and on with every span sent. Times are CPU times of the
thread; what is added is the median of the differences within samples, so that
neither other programs nor drift of the machine count. Facts are drained
between samples: what that takes is measured in ``drain.py``.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "connector"))

import scheduling
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvlens.connector import layout, managers, watch
from kvlens.connector.observer import Observer
from kvlens.telemetry.emit.export_queue import ExportQueue
from kvlens.telemetry.emit.otel import SpanSink
from kvlens.telemetry.emit.prometheus import StatsSink
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import EngineInfo

CHUNK = 16
RUNNING = 16
SIZES = (1, 16, 256, 4096)
BUILDS = 7
"""Times that the four schedulers are made anew: where an instance happens to lie in
memory shifts all its lookups by a percent, more than what is measured."""
SAMPLES = {1: 100, 16: 100, 256: 60, 4096: 20}
"""Of each build."""
GROUPS = {
    "one group": [scheduling.Group("full_attention", CHUNK)],
    "four groups": [
        scheduling.Group("full_attention", CHUNK),
        scheduling.Group("sliding_window", CHUNK, window=128),
        scheduling.Group("sliding_window", CHUNK, window=64),
        scheduling.Group("mamba", CHUNK),
    ],
}
BASE_US, PER_GROUP_US, SHARE, OFF_US = 5.0, 0.7, 0.01, 1.0
"""The budget: what may be added with telemetry on, and off."""


class Request(scheduling.Request):
    """A request whose block hashes are made once, as vLLM's are."""

    hashes: list[bytes] = []

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes


class Nowhere(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


@dataclass
class Arm:
    """One scheduler with the prompt resident."""

    name: str
    scheduler: Any
    recorder: Recorder | None = None
    sinks: list[SpanSink] = field(default_factory=list)
    alive: deque[Any] = field(default_factory=lambda: deque(maxlen=RUNNING))
    """States of requests, which live longer than a lookup: without them vLLM's own lookups
    would reuse memory that is still in the cache, as they never do in an engine."""

    def sample(self, number: int, tokens: int) -> int:
        """Nanoseconds of CPU time that one lookup takes, after another to warm up."""
        self._lookup(Request(f"w{number}", tokens))
        return self._lookup(Request(f"r{number}", tokens))

    def _lookup(self, request: Request) -> int:
        scheduler = self.scheduler
        scheduler.on_new_request(request)
        start = time.thread_time_ns()
        scheduler.get_num_new_matched_tokens(request, 0)
        taken = time.thread_time_ns() - start
        status = scheduler._req_status.pop(request.request_id)
        self.alive.append(status)
        if self.name == "interface":
            scheduler.watcher.ended(request)
        elif self.recorder is not None:
            scheduler.observer.finished(request, status)
        return taken

    def settle(self) -> None:
        """Let facts become records, between samples."""
        if self.recorder is not None:
            self.recorder.flush()


def build_arms(groups: list[scheduling.Group], chunks: int) -> list[Arm]:
    """One scheduler for each arm."""
    arms = []
    for name in ("stock", "off", "interface", "on", "on, all spans"):
        settings = {"lookup": "stock", "corrections": "none", "telemetry": name != "off"}
        scheduler = scheduling.build(
            groups,
            settings=settings,
            block_drop=False,
            capacity=4 * len(groups) * (chunks + 2),
            cls=OffloadingConnectorScheduler if name in ("stock", "interface") else None,
        )
        recorder, sinks = None, []
        if name == "interface":
            recorder = watched(scheduler)
        if name.startswith("on"):
            info = engine_info(scheduler)
            if name != "on":
                sinks = [SpanSink(info, ExportQueue(Nowhere(), "nowhere", 100_000))]
            recorder = Recorder(info, StatsSink(info), sinks)
            scheduler.observe(Observer(recorder))
        arms.append(Arm(name, scheduler, recorder, sinks))
    return arms


def watched(scheduler: Any) -> Recorder:
    """Watch a scheduler of vLLM's own as a connector is, through its public methods."""
    info = engine_info(scheduler, depth="interface")
    recorder = Recorder(info, StatsSink(info))
    scheduler.watcher = watch.InterfaceObserver(recorder)
    watch.attach(scheduler, scheduler.watcher)
    managers.watch(scheduler.manager, scheduler.watcher)
    return recorder


def engine_info(scheduler: Any, depth: str = "groups") -> EngineInfo:
    """An engine with this scheduler's layout."""
    return EngineInfo(
        depth=depth,
        engine_id="bench",
        incarnation_id="bench",
        model="bench",
        started_at=0.0,
        kvlens_version="bench",
        vllm_version="bench",
        layout=layout.describe(scheduler, scheduler.kv_cache_config, None),
        capacity_chunks=100_000,
    )


def measure(groups: list[scheduling.Group], chunks: int) -> dict[str, Any]:
    """Medians in microseconds for one prompt length."""
    builds = [sample_arms(build_arms(groups, chunks), chunks, build) for build in range(BUILDS)]
    stock = statistics.median(statistics.median(times["stock"]) for times in builds) / 1000

    def added(name: str) -> float:
        return (
            statistics.median(
                statistics.median(a - b for a, b in zip(times[name], times["stock"], strict=True))
                for times in builds
            )
            / 1000
        )

    return {
        "chunks": chunks,
        "stock_us": stock,
        "added_us": {name: added(name) for name in builds[0] if name != "stock"},
        "off_us": OFF_US,
        "budget_us": BASE_US + PER_GROUP_US * len(groups) + SHARE * stock,
    }


def sample_arms(arms: list[Arm], chunks: int, seed: int) -> dict[str, list[int]]:
    """Nanoseconds of every sample by arm."""
    tokens = chunks * CHUNK + 1
    Request.hashes = scheduling.Request("x", tokens).block_hashes
    for arm in arms:
        scheduling.store_all(arm.scheduler, Request("resident", tokens))
        arm.scheduler._req_status.pop("resident")
    times: dict[str, list[int]] = {arm.name: [] for arm in arms}
    rng = random.Random(seed)
    gc.collect()
    gc.disable()
    try:
        for number in range(SAMPLES[chunks]):
            for arm in rng.sample(arms, len(arms)):
                times[arm.name].append(arm.sample(number, tokens))
            for arm in arms:
                arm.settle()
    finally:
        gc.enable()
        for arm in arms:
            for sink in arm.sinks:
                sink.close()
    return times


def run() -> list[dict[str, Any]]:
    """All rows."""
    rows = []
    for name, groups in GROUPS.items():
        for chunks in SIZES:
            rows.append({"layout": name, **measure(groups, chunks)})
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
