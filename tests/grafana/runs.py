"""Runs of vLLM's own scheduler, seen twice: as records, and as what Prometheus scrapes."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

import pytest

from grafana.rule_cases import UP, kv
from kvlens.connector.config import LookupMode
from kvlens.connector.simulation import driver, recording
from kvlens.connector.simulation.reading import parse
from kvlens.dashboard.detect.offline import detect
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.settings import Settings
from kvlens.telemetry import semconv
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import GROUP_LABELS, Metric
from kvlens.telemetry.sinks import Labels

MINUTE = 60.0


@dataclass(eq=False)
class Numbers(recording.Records):
    """Keeps every number with its simulated time."""

    clock: recording.Clock | None = None
    counts: dict[tuple[Metric, Labels], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    samples: dict[tuple[Metric, Labels], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    gauges: dict[tuple[Metric, Labels], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        super().count(metric, value, labels)
        self.counts[metric, labels].append((self._now, value))

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        self.samples[metric, labels].append((self._now, value))

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        super().gauge(metric, value, labels)
        self.gauges[metric, labels].append((self._now, value))

    @property
    def _now(self) -> float:
        assert self.clock is not None
        return self.clock.seconds - recording.START_NS / 1e9


@dataclass(frozen=True)
class Run:
    """One run: the incidents that are open at its end, and its series for promtool."""

    incidents: set[str]
    series: dict[str, str]
    minutes: int


def run(text: str, name: str, lookup: LookupMode, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Simulate a scenario on the installed vLLM."""
    numbers = Numbers()
    made: list[recording.Clock] = []

    class Watched(recording.Clock):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            numbers.clock = self

    monkeypatch.setattr(driver, "Records", lambda: numbers)
    monkeypatch.setattr(driver, "Clock", Watched)
    result = driver.simulate(parse(text, name), name, lookup)
    seconds = made[0].seconds - recording.START_NS / 1e9
    detectors = all_detectors(Settings(store="unused.db").thresholds)
    found = detect(result.engine, result.requests, result.waiting, detectors)
    open_ = {incident.kind for incident in found if incident.state == "open"}
    return Run(
        open_, series(numbers, result.engine, int(seconds // MINUTE)), int(seconds // MINUTE)
    )


def series(numbers: Numbers, engine: EngineInfo, minutes: int) -> dict[str, str]:
    """What a scrape every minute would have seen; children of closed labels begin at 0."""
    found = dict(UP)
    groups = [(str(g.kv_group), g.group_kind) for g in engine.layout.groups]
    for metric in semconv.METRICS:
        if metric.type == "counter":
            for labels in _children(metric, groups):
                found |= _one(metric, labels, _sums(numbers.counts[metric, labels], minutes))
        elif metric.type == "gauge" and (metric, ()) in numbers.gauges:
            values = _levels(numbers.gauges[metric, ()], minutes)
            found |= _one(metric, (), values)
        elif metric.type == "histogram" and not metric.labels:
            found |= _histogram(metric, numbers.samples[metric, ()], minutes)
    return found


def _children(metric: Metric, groups: list[tuple[str, ...]]) -> list[Labels]:
    if metric.labels == GROUP_LABELS:
        return groups
    if not metric.labels:
        return [()]
    return [(value,) for value in metric.values[0]] if len(metric.values) == 1 else []


def _one(
    metric: Metric, labels: Labels, values: list[float], part: str = "", **more: str
) -> dict[str, str]:
    named = dict(zip(metric.labels, labels, strict=True))
    text = " ".join(f"{value:g}" if value != int(value) else f"{value:.0f}" for value in values)
    return kv(metric, text, part=part, **{**named, **more})


def _sums(events: list[tuple[float, float]], minutes: int) -> list[float]:
    times = [at for at, _ in events]
    sums = [0.0, *accumulate(value for _, value in events)]
    return [sums[bisect_right(times, minute * MINUTE)] for minute in range(minutes + 1)]


def _levels(events: list[tuple[float, float]], minutes: int) -> list[float]:
    times = [at for at, _ in events]
    levels = [0.0, *(value for _, value in events)]
    return [levels[bisect_right(times, minute * MINUTE)] for minute in range(minutes + 1)]


def _histogram(metric: Metric, samples: list[tuple[float, float]], minutes: int) -> dict[str, str]:
    found: dict[str, str] = {}
    edges = [*(metric.buckets or ()), float("inf")]
    for edge in edges:
        below = [(at, 1.0) for at, value in samples if value <= edge]
        name = "+Inf" if edge == float("inf") else repr(float(edge))
        found |= _one(metric, (), _sums(below, minutes), "_bucket", le=name)
    counted = [(at, 1.0) for at, _ in samples]
    return found | _one(metric, (), _sums(counted, minutes), "_count")
