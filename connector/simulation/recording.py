"""What a simulation records: facts on simulated time, and the records made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import RequestRecord
from kvlens.telemetry.semconv import Metric
from kvlens.telemetry.sinks import Labels

START_NS = 1_700_000_000_000_000_000
"""When every simulation starts, so that equal scenarios give equal records."""


class Clock:
    """Simulated time, in nanoseconds; also a sink that stamps facts with it."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.recorder: Recorder | None = None

    @property
    def seconds(self) -> float:
        """Unix seconds."""
        return self.now_ns / 1e9

    def append(self, fact: tuple[Any, ...]) -> None:
        """Pass a fact on as of now."""
        assert self.recorder is not None
        if fact[0] == facts.STEP:  # real time, which no two runs share
            return
        if fact[0] == facts.LOOKUP:
            fact = (fact[0], self.now_ns, fact[2], self.now_ns, *fact[4:])
        else:
            fact = (fact[0], self.now_ns, *fact[2:])
        self.recorder.append(fact)


@dataclass(eq=False)
class Records:
    """Takes records; a simulation sends nothing anywhere."""

    requests: list[RequestRecord] = field(default_factory=list)
    waiting: list[RequestRecord] = field(default_factory=list)
    errors: int = 0
    fallbacks: set[Labels] = field(default_factory=set)
    """Why vLLM's own lookup was used instead of the one asked for."""

    dropped = 0
    dropped_metric = semconv.DROPPED_SPANS
    sampled = False

    def request(self, record: RequestRecord) -> None:
        """Take a finished request."""
        self.requests.append(record)

    def deferral(self, record: RequestRecord) -> None:
        """Take an in-flight record."""
        self.waiting.append(record)

    def close(self) -> None:
        """Nothing to close."""

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        """Errors of kvlens itself are the only number of interest."""
        if metric is semconv.OBSERVER_ERRORS:
            self.errors += int(value)

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        """Not kept."""

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Of gauges only a fallback matters: the results are then not what was asked for."""
        if metric is semconv.LOOKUP_FALLBACK and value:
            self.fallbacks.add(labels)
