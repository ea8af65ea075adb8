"""Counting: lookups, chunks and stores as metrics, and what a request computed."""

from __future__ import annotations

from collections import Counter

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly.open_request import Answer, OpenRequest
from kvlens.telemetry.records import EngineInfo, GroupChunks, GroupLayout, Layout, Store
from kvlens.telemetry.semconv import Exit, Metric
from kvlens.telemetry.sinks import Labels, MetricSink
from kvlens.telemetry.state.residency import LIVE, Residency, State
from kvlens.telemetry.verdict.oracle import required_chunks, whole_boundary


class Counters:
    """Numbers of one engine, by its KV-cache groups."""

    def __init__(self, layout: Layout, metrics: MetricSink) -> None:
        self._metrics = metrics
        self._labels: dict[int, Labels] = {
            group.kv_group: (str(group.kv_group), group.group_kind) for group in layout.groups
        }
        self._gauges: dict[tuple[str, Labels], int] = {}

    def exit(self, how: Exit) -> None:
        """One lookup ended."""
        self._metrics.count(semconv.LOOKUPS, 1, (str(how),))

    def answered(self, answer: Answer, trace_id: str) -> None:
        """One lookup was answered and its exit is final."""
        answer.counted = True
        lookup = answer.lookup
        self.exit(Exit(lookup.exit))
        self._metrics.observe(semconv.LOOKUP_SECONDS, lookup.seconds, trace_id=trace_id)
        for group in lookup.groups:
            if not group.pass_number:
                continue
            labels = self._labels[group.kv_group]
            if group.popped:
                self._metrics.count(semconv.POPS, group.popped, labels)
            if group.pass_number == 1:
                self._metrics.observe(semconv.LOOKUP_WIDTH, group.width, labels)
                self._metrics.observe(semconv.LOOKUP_HITS, group.raw_hits or 0, labels)
        if lookup.vetoing_group is not None:
            self._metrics.count(semconv.VETOES, 1, self._labels[lookup.vetoing_group])

    def chunks(self, metric: Metric, keys: facts.Keys) -> Counter[int]:
        """Count chunks by group; returns the counts."""
        counts = facts.count_by_group(keys)
        for kv_group, count in counts.items():
            if (labels := self._labels.get(kv_group)) is not None:
                self._metrics.count(metric, count, labels)
        return counts

    def reset(self, residency: Residency) -> None:
        """Count what is given up. Call before residency replays it."""
        for kv_group, labels in self._labels.items():
            self._metrics.count(semconv.RESET_CHUNKS, residency.resident_count(kv_group), labels)

    def offer(self, fact: facts.Offered, residency: Residency, time: float) -> Store:
        """Count one offer; returns its record. Call before residency replays it."""
        offered = facts.count_by_group(fact.offered)
        groups = {g: GroupChunks(kv_group=g, offered=n) for g, n in offered.items()}
        accepted = None if fact.accepted is None else frozenset(fact.accepted)
        if accepted is None:
            for group in groups.values():
                group.refused = group.offered
        else:
            for kv_group, count in facts.count_by_group(accepted).items():
                groups[kv_group].stored = count
            for key in fact.offered if len(accepted) < len(fact.offered) else ():
                if key not in accepted:
                    group = groups[facts.group_of(key)]
                    if residency.state(key) in LIVE:
                        group.already += 1
                    else:
                        group.excluded += 1
        if fact.evicted:
            self.chunks(semconv.EVICTED_CHUNKS, fact.evicted)
        if accepted is None:
            self.chunks(semconv.REFUSED_CHUNKS, fact.offered)
        return Store(
            time=time,
            groups=[groups[kv_group] for kv_group in sorted(groups)],
            evictions=len(fact.evicted),
            refused=accepted is None,
        )

    def held_back(self, kv_group: int, count: int) -> None:
        """Count chunks that a finished request never offered."""
        self._metrics.count(semconv.HELD_BACK_CHUNKS, count, self._labels[kv_group])

    def gauges(self, residency: Residency, deferred: int) -> None:
        """Set gauges that changed."""
        values: dict[tuple[str, Labels], int] = {(semconv.DEFERRED_REQUESTS.name, ()): deferred}
        for kv_group, labels in self._labels.items():
            values[semconv.RESIDENT_CHUNKS.name, labels] = residency.resident_count(kv_group)
        for (name, labels), value in values.items():
            if self._gauges.get((name, labels)) != value:
                self._gauges[name, labels] = value
                self._metrics.gauge(semconv.METRICS_BY_NAME[name], value, labels)


def storable_tokens(info: EngineInfo, request: OpenRequest, finished: facts.Finished) -> int:
    """Tokens of a finished request that policy lets the engine store."""
    tokens = finished.computed_tokens
    if info.offload_prompt_only:
        tokens = min(tokens, request.added.prompt_tokens)
    if request.added.max_offload_tokens is not None:
        tokens = min(tokens, request.added.max_offload_tokens)
    return tokens


def unwritten_chunk(
    layout: Layout, finished: facts.Finished, accepted: facts.Keys
) -> tuple[int, int] | None:
    """``(kv_group, chunk)`` that was accepted although its last tokens have no KV; None if none.

    A finished request's last sampled token was never computed, so that a chunk
    which ends with it has a slot that nobody wrote.
    """
    taken = frozenset(accepted)
    for group, (keys, _) in zip(layout.groups, finished.keys, strict=True):
        chunk = group.tokens_per_chunk
        stop = min(finished.num_tokens // chunk, len(keys))
        for index in range(finished.computed_tokens // chunk, stop):
            if keys[index] in taken:
                return group.kv_group, index
    return None


def note_computed(
    info: EngineInfo, residency: Residency, request: OpenRequest, finished: facts.Finished
) -> None:
    """Tell residency which complete chunks of attention groups this request computed.

    A recurrent group keeps states only where the engine materialised them, and
    those it offers: they are known from the offers alone.
    """
    storable = storable_tokens(info, request, finished)
    for group, (keys, length) in zip(info.layout.groups, finished.keys, strict=True):
        if group.group_kind == semconv.GroupKind.MAMBA:
            continue
        every = min(finished.computed_tokens // group.tokens_per_chunk, length)
        allowed = min(storable // group.tokens_per_chunk, every)
        if group.full_attention or info.retention_interval is None:
            residency.computed(keys[:allowed], State.COMPUTED)
            residency.computed(keys[allowed:every], State.EXCLUDED)
            continue
        wanted = retained_chunks(info, group, request.added.prompt_tokens)
        residency.computed((keys[k] for k in range(allowed) if k in wanted), State.COMPUTED)
        unwanted = (keys[k] for k in range(every) if k >= allowed or k not in wanted)
        unseen = [key for key in unwanted if residency.state(key) is State.NEVER_SEEN]
        residency.computed(unseen, State.EXCLUDED)


def retained_chunks(info: EngineInfo, group: GroupLayout, prompt_tokens: int) -> set[int]:
    """Chunks of a windowed group that ``prefix_cache_retention_interval`` is to keep.

    Those that the same prompt would need again, and those at each multiple of
    the interval. What it leaves out is policy's, not a loss.
    """
    last = whole_boundary(info.layout, prompt_tokens)
    interval = info.retention_interval
    chunks: set[int] = set()
    for boundary in (last, *(range(interval, last, interval) if interval else ())):
        chunks.update(required_chunks(group, 0, boundary) or ())
        if group.pop:
            chunks.add(-(-boundary // group.tokens_per_chunk))
    return chunks


def note_held_back(info: EngineInfo, residency: Residency, request: OpenRequest) -> dict[int, int]:
    """Mark trailing chunks of drafter groups that were never offered; count by group."""
    finished = request.finished
    counts: dict[int, int] = {}
    if finished is None:
        return counts
    storable = storable_tokens(info, request, finished)
    for group, (keys, length) in zip(info.layout.groups, finished.keys, strict=True):
        if not group.drafter_used:
            continue
        end = min(storable // group.tokens_per_chunk, length)
        start = end
        while start and residency.state(keys[start - 1]) is State.COMPUTED:
            start -= 1
        if start < end:
            residency.computed(keys[start:end], State.HELD_BACK)
            counts[group.kv_group] = end - start
    return counts
