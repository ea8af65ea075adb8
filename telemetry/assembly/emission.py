"""From a finished request to its record, its numbers and its spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly import accounting, lookups
from kvlens.telemetry.assembly.economics import Economics
from kvlens.telemetry.assembly.open_request import Answer, OpenRequest, bounded_id, external_id
from kvlens.telemetry.guard import Guard
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import (
    DEFERRED_EXITS,
    QUIET_VERDICTS,
    Exit,
    GroupKind,
    Verdict,
)
from kvlens.telemetry.sinks import MetricSink, RecordSink
from kvlens.telemetry.state.identities import Identities
from kvlens.telemetry.state.numbering import Numbering
from kvlens.telemetry.state.residency import Residency, State
from kvlens.telemetry.verdict.case import Case, UnsafeState, expected_boundary
from kvlens.telemetry.verdict.judge import judge, judge_store
from kvlens.telemetry.verdict.oracle import servable_boundary

DEFERRAL_FIRST_NS = 1_000_000_000
DEFERRAL_EVERY_NS = 5_000_000_000
MAX_FRONT_END_SECONDS = 300.0
"""A request cannot have arrived longer than that before the scheduler saw it."""


class Emitter:
    """Weighs lookups while residency stands as it stood, judges and emits requests."""

    def __init__(
        self,
        info: EngineInfo,
        metrics: MetricSink,
        sinks: Sequence[RecordSink],
        residency: Residency,
        wall: Callable[[int], float],
        sample_rate: float,
        guard: Guard | None = None,
        identities: Identities | None = None,
        economics: Economics | None = None,
    ) -> None:
        self._info = info
        self._metrics = metrics
        self._sinks = sinks
        self._residency = residency
        self._wall = wall
        self._sample_rate = sample_rate
        self._guard = guard or Guard(metrics)
        self._identities = identities or Identities(info.layout, metrics)
        self._economics = economics or Economics(info, metrics)
        self._all_recorded = any(not sink.sampled for sink in sinks)
        self._count = accounting.Counters(info.layout, metrics)
        self._numbering = Numbering(info.layout)
        self._dropped: dict[int, int] = {}
        self.dropped_facts = 0
        """Facts that the queue had no room for."""

    def weigh(self, answer: Answer, request: OpenRequest) -> None:
        """Servable and expected tokens of a lookup, as residency stands at it.

        What the lookup found is not looked at again: a boundary further on needs
        nothing below the found one that this did not need as well.
        """
        fact, layout = answer.fact, self._info.layout
        state = lookups.state_of(layout, self._residency, fact.keys)
        local, found = fact.local_tokens, fact.result or 0
        reached = local + found
        cap = None if fact.max_new_tokens is None else max(0, fact.max_new_tokens - found)
        if not request.added.skip_reading:
            answer.servable = -local + servable_boundary(
                layout,
                lambda kv_group, chunk: state(kv_group, chunk) is State.RESIDENT,
                reached,
                fact.num_tokens,
                request.added.prompt_tokens,
                cap,
            )
            answer.expected = -local + expected_boundary(
                layout, state, reached, fact.num_tokens, cap
            )
        answer.seen_before = any(keys and self._residency.seen(keys[0]) for keys, _ in fact.keys)

    def judge(self, request: OpenRequest, unresolved: bool = False) -> None:
        """Verdict of a request, once; right after its admission residency still stands."""
        info, answer = self._info, request.answer or self._waiting(request)
        last = request.lookups[-1] if request.lookups else None
        unsafe = None
        if answer is not None and request.served:
            unsafe = self._unsafe(answer, request.served)
        fact = answer.fact if answer is not None else None
        state = lookups.state_of(info.layout, self._residency, fact.keys if fact else None)
        case = Case(
            layout=info.layout,
            prompt_tokens=request.added.prompt_tokens,
            num_tokens=fact.num_tokens if fact else request.added.prompt_tokens,
            local=fact.local_tokens if fact else 0,
            served=request.served,
            failed=request.failed_tokens,
            unstarted=request.finished is not None and request.started is None,
            servable=max(answer.servable, request.served, request.failed_tokens) if answer else 0,
            expected=max(answer.expected, request.served, request.failed_tokens) if answer else 0,
            residency_known=not self._residency.unknown,
            seen_before=answer.seen_before if answer else False,
            exit=answer.lookup.exit if answer else None,
            vetoing_group=answer.lookup.vetoing_group if answer else None,
            lookups=answer.lookup.groups if answer else (),
            cap=fact.max_new_tokens if fact else None,
            load_cap=request.added.max_load_tokens,
            skip_reading=request.added.skip_reading,
            other_connector=request.other_connector,
            block_drop=info.block_drop,
            widens=info.widens,
            load_window=info.load_window,
            offload_prompt_only=info.offload_prompt_only,
            store_threshold=info.store_threshold,
            retention_interval=info.retention_interval,
            capacity_chunks=info.capacity_chunks,
            persistent_tier=info.persistent_tier,
            lower_tiers=info.lower_tiers,
            hash_seed_fixed=info.hash_seed_fixed,
            deferral_seconds=request.deferral_ns / 1e9,
            deferrals=request.deferrals,
            deferred_exit=request.deferred_exit,
            waited_for=request.waited_for,
            unresolved=unresolved or (last is not None and Exit(last.exit) in DEFERRED_EXITS),
            unsafe=unsafe,
            state=state,
        )
        request.case, request.judgement = case, judge(case)
        if answer is not None and (self._all_recorded or self._kept(request) is not None):
            lookups.fill_resident(info.layout, answer.lookup, self._residency, answer.fact.keys)

    def _waiting(self, request: OpenRequest) -> Answer | None:
        """What a request that was never answered waits for, as residency stands now."""
        if request.asked is None:
            return None
        waiting = Answer(request.asked, request.lookups[-1])
        self.weigh(waiting, request)
        return waiting

    def _unsafe(self, answer: Answer, served: int) -> UnsafeState | None:
        """The recurrent state that was loaded although it lies beyond the boundary."""
        if answer.fact.partial_tail is not None:
            return None
        boundary = answer.fact.local_tokens + served
        usable = min(boundary, answer.fact.num_tokens - 1)
        for group in answer.lookup.groups:
            if group.group_kind != GroupKind.MAMBA:
                continue
            # vLLM loads the chunk that holds the boundary's last token.
            group.state_chunk = -(-boundary // group.tokens_per_chunk) - 1
            contains = (group.state_chunk + 1) * group.tokens_per_chunk
            if contains > usable:
                return UnsafeState(group.kv_group, group.state_chunk, contains)
        return None

    def _kept(self, request: OpenRequest) -> float | None:
        """Probability with which this request's record is kept; None if it is not."""
        if request.judgement.verdict not in QUIET_VERDICTS:
            return 1.0
        # By the id, so that all who see this request decide alike.
        draw = crc32(request.request_id.encode()) / 2**32
        return self._sample_rate if draw < self._sample_rate else None

    def report_deferral(self, request: OpenRequest, now_ns: int) -> None:
        """Emit an in-flight record of a request whose lookup has waited too long."""
        since = request.deferred_since_ns
        if since is None or now_ns - since < DEFERRAL_FIRST_NS or now_ns < request.next_deferral_ns:
            return
        request.next_deferral_ns = now_ns + DEFERRAL_EVERY_NS
        earlier, request.deferral_ns = request.deferral_ns, request.deferral_ns + now_ns - since
        try:
            self.judge(request, unresolved=True)
            record = self.record(request, self._wall(now_ns))
            # Once the write is done, and the request was answered, nothing else tells.
            request.waited_for = request.case.first_pending if request.case else None
        finally:
            request.deferral_ns, request.judgement = earlier, None
        for sink in self._sinks:
            self._guard(sink.deferral, record)

    def emit(self, request: OpenRequest) -> None:
        """Count a finished request and hand its record to the sinks."""
        if request.judgement is None:
            self.judge(request)
        if request.unwritten is not None and request.case is not None:
            case = replace(request.case, unwritten=request.unwritten)
            request.judgement = judge_store(case, request.judgement)
        self._note_held_back(request)
        finished_ns = request.finished.time_ns if request.finished else request.added.time_ns
        record = self.record(request, self._wall(finished_ns))
        self._economics.charge(record)
        self._numbers(record)
        if record.computed_tokens is not None:
            served = record.served_tokens + record.other_tokens
            self._identities.request(
                record.prompt_tokens, record.local_tokens, served, record.computed_tokens
            )
        probability = self._kept(request)
        record.sampling_probability = 1.0 if probability is None else probability
        for sink in self._sinks:
            if probability is not None or not sink.sampled:
                self._guard(sink.request, record)
        for sink in self._sinks:
            self._guard(self._note_dropped, sink)

    def _note_held_back(self, request: OpenRequest) -> None:
        held_back = accounting.note_held_back(self._info, self._residency, request)
        for kv_group, count in held_back.items():
            self._count.held_back(kv_group, count)

    def _numbers(self, record: RequestRecord) -> None:
        self._metrics.count(semconv.REQUESTS, 1, (record.verdict,))
        for metric, tokens in (
            (semconv.EXPECTED_TOKENS, record.expected_tokens),
            (semconv.SERVABLE_TOKENS, record.servable_tokens),
            (semconv.SERVED_TOKENS, record.served_tokens),
        ):
            self._metrics.count(metric, tokens)
        if record.lost_tokens:
            cause = record.cause or str(semconv.Cause.NOT_ATTRIBUTABLE)
            self._metrics.count(semconv.LOST_TOKENS, record.lost_tokens, (cause,))

    def _note_dropped(self, sink: RecordSink) -> None:
        dropped = sink.dropped
        if (more := dropped - self._dropped.get(id(sink), 0)) > 0:
            self._dropped[id(sink)] = dropped
            self._metrics.count(sink.dropped_metric, more)

    def _arrival(self, added: facts.Added) -> float:
        """When the request came, by the clock of all other times in its record.

        vLLM's own time stamp is of another process' wall clock, which may have been
        set since, or be another machine's.
        """
        seen = self._wall(added.time_ns)
        stamped = 0.0 <= seen - added.arrival_time <= MAX_FRONT_END_SECONDS
        return added.arrival_time if stamped else seen

    def record(self, request: OpenRequest, finish_time: float) -> RequestRecord:
        """The record of a judged request."""
        info, said = self._info, request.judgement
        finished = request.finished
        skipped = said.verdict is Verdict.SKIPPED
        return RequestRecord(
            request_id=bounded_id(external_id(request.request_id)),
            internal_request_id=bounded_id(request.request_id),
            engine_id=info.engine_id,
            incarnation_id=info.incarnation_id,
            dp_rank=info.dp_rank,
            model=info.model,
            trace_id=request.trace_id,
            parent_span_id=request.parent_span_id,
            arrival_time=self._arrival(request.added),
            finish_time=finish_time,
            started_at=None if request.started_ns is None else self._wall(request.started_ns),
            prompt_tokens=request.added.prompt_tokens,
            local_tokens=_local_tokens(request),
            served_tokens=request.served,
            servable_tokens=0 if skipped else said.servable,
            expected_tokens=0 if skipped else said.expected,
            lost_tokens=said.lost,
            lost_at_lookup=said.lost_at_lookup,
            lost_at_store=said.lost_at_store,
            computed_tokens=None
            if request.started is None
            else request.added.prompt_tokens - request.started,
            failed_tokens=request.failed_tokens,
            other_tokens=request.other_tokens,
            evicted_tokens=said.evicted,
            tier_tokens=request.tiers,
            ghost_chunks=request.ghost_chunks,
            ghost_distance=request.ghost_distance,
            reuse_distance=request.reuse_distance,
            prefix_blocks=self._numbering.of(request.added, finished) if finished else [],
            prefix_block_tokens=self._numbering.block_tokens,
            resident_chunks=self._residency.resident_counts(),
            verdict=str(said.verdict),
            cause=str(said.cause) if said.cause else None,
            causes=[str(cause) for cause in said.causes],
            confidence=str(said.confidence),
            vetoing_group=said.vetoing_group,
            summary=said.summary,
            evidence=said.evidence,
            next_step=said.next_step,
            lookups=request.lookups,
            stores=request.stores,
            loads=request.loads,
            deferral_seconds=request.deferral_ns / 1e9,
            output_tokens=finished.num_tokens - request.added.prompt_tokens if finished else 0,
            finish_reason=finished.reason if finished else "",
            preemptions=request.preemptions,
            truncated=request.truncated,
            depth=info.depth,
            connector=info.connector,
            dropped=self.dropped_facts + sum(self._dropped.values()),
        )


def _local_tokens(request: OpenRequest) -> int:
    """vLLM's own account, else what the lookup was told, which leaves out part of a block."""
    if request.local_tokens is not None:
        return request.local_tokens
    return request.answer.fact.local_tokens if request.answer is not None else 0
