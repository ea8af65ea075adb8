"""An engine's facts, made by hand, and sinks that keep what they are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.records import EngineInfo, GroupLayout, Layout, RequestRecord
from kvlens.telemetry.semconv import Metric

MS = 1_000_000
SECOND = 1000 * MS


def layout(**changes: Any) -> Layout:
    """Full attention with chunks of 16 tokens beside a recurrent group with 64."""
    drafters = changes.pop("drafters_used", ())
    groups = [
        GroupLayout(kv_group=0, group_kind="full_attention", tokens_per_block=16,
                    tokens_per_chunk=16, drafter_used=0 in drafters),
        GroupLayout(kv_group=1, group_kind="mamba", tokens_per_block=64,
                    tokens_per_chunk=64, drafter_used=1 in drafters),
    ]  # fmt: skip
    return Layout(groups=groups, tokens_per_hash=16, **changes)


def engine(**changes: Any) -> EngineInfo:
    """One engine."""
    values: dict[str, Any] = {
        "engine_id": "engine-0", "incarnation_id": "first", "model": "tiny", "started_at": 0.0,
        "kvlens_version": "0", "vllm_version": "0.29.0", "layout": layout(),
        "capacity_chunks": 100,
    }  # fmt: skip
    return EngineInfo(**{**values, **changes})


@dataclass
class Numbers:
    """Keeps counters, samples and gauges by (name, labels)."""

    counters: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    samples: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=dict)
    gauges: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    exemplars: dict[str, list[str]] = field(default_factory=dict)

    def count(self, metric: Metric, value: float = 1, labels: tuple[str, ...] = ()) -> None:
        key = (metric.name, labels)
        self.counters[key] = self.counters.get(key, 0) + value

    def observe(
        self, metric: Metric, value: float, labels: tuple[str, ...] = (), trace_id: str = ""
    ) -> None:
        self.samples.setdefault((metric.name, labels), []).append(value)
        if trace_id:
            self.exemplars.setdefault(metric.name, []).append(trace_id)

    def gauge(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        self.gauges[metric.name, labels] = value


@dataclass
class Kept:
    """Keeps records."""

    requests: list[RequestRecord] = field(default_factory=list)
    deferrals: list[RequestRecord] = field(default_factory=list)
    dropped: int = 0
    sampled: bool = True
    dropped_metric: Metric = semconv.DROPPED_SPANS
    closed: bool = False

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def deferral(self, record: RequestRecord) -> None:
        self.deferrals.append(record)

    def close(self) -> None:
        self.closed = True


class Engine:
    """Says what an engine does, as facts; the clock moves a millisecond per fact."""

    def __init__(self, info: EngineInfo | None = None, sample_rate: float = 1.0) -> None:
        self.info = info or engine()
        self.numbers, self.kept = Numbers(), Kept()
        self.now = SECOND
        self.jobs = 0
        self.assembler = Assembler(
            self.info, self.numbers, [self.kept], sample_rate=sample_rate, wall_offset_ns=0
        )

    def say(self, kind: int, *rest: Any) -> None:
        self.now += MS
        self.assembler.handle((kind, self.now, *rest))

    def keys(self, prompt: str, tokens: int) -> list[list[bytes]]:
        """Offload keys per group of a prompt's complete chunks."""
        return [
            [
                f"{prompt}/{(chunk + 1) * g.tokens_per_chunk:08d}".encode()
                + g.kv_group.to_bytes(4, "big")
                for chunk in range(tokens // g.tokens_per_chunk)
            ]
            for g in self.info.layout.groups
        ]

    def add(self, request: str, tokens: int, **more: Any) -> None:
        self.say(
            facts.ADDED, request, self.now / 1e9, tokens, more.get("headers"),
            more.get("skip", False), more.get("max_offload"),
        )  # fmt: skip

    def look(
        self,
        request: str,
        prompt: str,
        tokens: int,
        result: int | None,
        found: list[tuple[int, int, int | None]],
        local: int = 0,
        in_transfer: bool = False,
    ) -> None:
        """A lookup; ``found`` holds (position of group, width, hits)."""
        keys = self.keys(prompt, tokens)
        queries = [(keys[group][0], width, hits, None) for group, width, hits in found]
        pairs = [(names, len(names)) for names in keys]
        self.say(
            facts.LOOKUP, request, self.now + MS // 10, local, tokens, result, queries, pairs,
            in_transfer, None, None,
        )  # fmt: skip

    def admit(self, request: str, external: int, keys: set[bytes] | None = None) -> int:
        self.jobs += 1
        job = self.jobs if external else None
        self.say(facts.ADMITTED, request, external, job, keys or set())
        return self.jobs

    def store(
        self, request: str, keys: list[bytes], accepted: list[bytes] | None, evicted: Any = ()
    ) -> set[bytes]:
        """Offer, and if accepted complete a store; returns the job's keys."""
        self.say(facts.OFFERED, request, keys, accepted, list(evicted))
        if not accepted:
            return set()
        self.jobs += 1
        job_keys = set(accepted)
        self.say(facts.STORE_JOB, request, self.jobs, job_keys)
        self.say(facts.STORED, job_keys, True)
        return job_keys

    def finish(self, request: str, prompt: str, tokens: int, computed: int | None = None) -> None:
        keys = [(names, len(names)) for names in self.keys(prompt, tokens)]
        done = tokens if computed is None else computed
        self.say(facts.FINISHED, request, "length", tokens, done, keys)

    def settle(self) -> list[RequestRecord]:
        """Let finished requests be emitted."""
        self.now += SECOND
        self.assembler.tick(self.now)
        return self.kept.requests

    def serve_cold(self, request: str, prompt: str, tokens: int) -> None:
        """A request of which nothing is known: computed, stored, finished."""
        self.add(request, tokens)
        self.look(request, prompt, tokens, 0, [(0, tokens // 16, 0)])
        self.admit(request, 0)
        every = [key for names in self.keys(prompt, tokens) for key in names]
        self.store(request, every, every)
        self.finish(request, prompt, tokens)
