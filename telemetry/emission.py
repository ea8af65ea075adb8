"""From a finished request to its record, its numbers and its spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from kvlens.telemetry import accounting, lookups, semconv
from kvlens.telemetry.case import Case, Judgement, UnsafeState, expected_boundary
from kvlens.telemetry.oracle import servable_boundary
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.requests import Answer, OpenRequest, external_id
from kvlens.telemetry.residency import Residency, State
from kvlens.telemetry.semconv import DEFERRED_EXITS, QUIET_VERDICTS, Exit, GroupKind, Verdict
from kvlens.telemetry.sinks import MetricSink, RecordSink
from kvlens.telemetry.verdict import judge

DEFERRAL_FIRST_NS = 1_000_000_000
DEFERRAL_EVERY_NS = 5_000_000_000


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
    ) -> None:
        self._info = info
        self._metrics = metrics
        self._sinks = sinks
        self._residency = residency
        self._wall = wall
        self._sample_rate = sample_rate
        self._count = accounting.Counters(info.layout, metrics)
        self._dropped_spans = 0

    def weigh(self, answer: Answer, request: OpenRequest) -> None:
        """Servable and expected tokens of a lookup, as residency stands at it."""
        fact, layout = answer.fact, self._info.layout
        state = lookups.state_of(layout, self._residency, fact.keys)
        local, cap = fact.local_tokens, fact.max_new_tokens
        if not request.added.skip_reading:
            answer.servable = -local + servable_boundary(
                layout,
                lambda kv_group, chunk: state(kv_group, chunk) is State.RESIDENT,
                local,
                fact.num_tokens,
                request.added.prompt_tokens,
                cap,
            )
            answer.expected = -local + expected_boundary(layout, state, local, fact.num_tokens, cap)
        answer.seen_before = any(keys and self._residency.seen(keys[0]) for keys, _ in fact.keys)

    def judge(self, request: OpenRequest, unresolved: bool = False) -> Judgement:
        """Verdict of a request, once; right after its admission residency still stands."""
        info, answer = self._info, request.answer
        last = request.lookups[-1] if request.lookups else None
        unsafe = None
        if answer is not None and request.served:
            unsafe = self._unsafe(answer, request.served)
        deferred = [item for item in request.lookups if Exit(item.exit) in DEFERRED_EXITS]
        fact = answer.fact if answer is not None else None
        state = lookups.state_of(info.layout, self._residency, fact.keys if fact else None)
        case = Case(
            layout=info.layout,
            prompt_tokens=request.added.prompt_tokens,
            num_tokens=fact.num_tokens if fact else request.added.prompt_tokens,
            local=fact.local_tokens if fact else 0,
            served=request.served,
            servable=max(answer.servable, request.served) if answer else 0,
            expected=max(answer.expected, request.served) if answer else 0,
            residency_known=not self._residency.unknown,
            seen_before=answer.seen_before if answer else False,
            exit=answer.lookup.exit if answer else None,
            vetoing_group=answer.lookup.vetoing_group if answer else None,
            lookups=answer.lookup.groups if answer else (),
            cap=fact.max_new_tokens if fact else None,
            skip_reading=request.added.skip_reading,
            other_connector=request.other_connector,
            block_drop=info.block_drop,
            widens=info.widens,
            load_window=info.load_window,
            offload_prompt_only=info.offload_prompt_only,
            store_threshold=info.store_threshold,
            capacity_chunks=info.capacity_chunks,
            deferral_seconds=request.deferral_ns / 1e9,
            deferrals=sum(item.count for item in deferred),
            deferred_exit=deferred[-1].exit if deferred else None,
            unresolved=unresolved or (last is not None and Exit(last.exit) in DEFERRED_EXITS),
            unsafe=unsafe,
            state=state,
        )
        request.judgement = said = judge(case)
        if answer is not None and self._kept(request) is not None:
            lookups.fill_resident(info.layout, answer.lookup, state)
        return said

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
        self.judge(request, unresolved=True)
        record = self.record(request, self._wall(now_ns))
        request.deferral_ns, request.judgement = earlier, None
        for sink in self._sinks:
            sink.deferral(record)

    def emit(self, request: OpenRequest) -> None:
        """Count a finished request and hand its record to the sinks."""
        if request.judgement is None:
            self.judge(request)
        for kv_group, count in accounting.note_held_back(
            self._info, self._residency, request
        ).items():
            self._count.held_back(kv_group, count)
        finished_ns = request.finished.time_ns if request.finished else request.added.time_ns
        record = self.record(request, self._wall(finished_ns))
        self._numbers(record)
        probability = self._kept(request)
        if probability is not None:
            record.sampling_probability = probability
            for sink in self._sinks:
                sink.request(record)
        self._note_dropped_spans()

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

    def _note_dropped_spans(self) -> None:
        dropped = sum(sink.dropped for sink in self._sinks)
        if dropped > self._dropped_spans:
            self._metrics.count(semconv.DROPPED_SPANS, dropped - self._dropped_spans)
            self._dropped_spans = dropped

    def record(self, request: OpenRequest, finish_time: float) -> RequestRecord:
        """The record of a judged request."""
        info, said, answer = self._info, request.judgement, request.answer
        finished = request.finished
        skipped = said.verdict is Verdict.SKIPPED
        return RequestRecord(
            request_id=external_id(request.request_id),
            internal_request_id=request.request_id,
            engine_id=info.engine_id,
            incarnation_id=info.incarnation_id,
            dp_rank=info.dp_rank,
            model=info.model,
            trace_id=request.trace_id,
            parent_span_id=request.parent_span_id,
            arrival_time=request.added.arrival_time,
            finish_time=finish_time,
            prompt_tokens=request.added.prompt_tokens,
            local_tokens=answer.fact.local_tokens if answer else 0,
            served_tokens=request.served,
            servable_tokens=0 if skipped else said.servable,
            expected_tokens=0 if skipped else said.expected,
            lost_tokens=said.lost,
            lost_at_lookup=said.lost_at_lookup,
            lost_at_store=said.lost_at_store,
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
        )
