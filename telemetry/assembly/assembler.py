"""From ordered facts to finished request records; runs on the drain thread."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly import accounting, lookups, transfers
from kvlens.telemetry.assembly.economics import Economics
from kvlens.telemetry.assembly.emission import Emitter
from kvlens.telemetry.assembly.open_request import Answer, OpenRequest
from kvlens.telemetry.assembly.trace_context import parent_ids
from kvlens.telemetry.guard import Guard
from kvlens.telemetry.records import EngineInfo, Load, Lookup, Store
from kvlens.telemetry.semconv import DEFERRED_EXITS, Exit
from kvlens.telemetry.sinks import MetricSink, RecordSink
from kvlens.telemetry.state.identities import Identities
from kvlens.telemetry.state.residency import Residency

MAX_OPEN = 100_000
"""Unfinished requests remembered; the oldest is emitted early beyond it."""
LINGER_NS = 400_000_000
"""How long a finished request waits for its last stores before it is emitted."""
SETTLE_NS = 60_000_000
"""How long a finished request waits for its last stores to be decided."""


class Assembler:
    """Replays facts in order; emits one record per finished request."""

    _emits: type[Emitter] = Emitter

    def __init__(
        self,
        info: EngineInfo,
        metrics: MetricSink,
        sinks: Sequence[RecordSink],
        sample_rate: float = 1.0,
        wall_offset_ns: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._info = info
        self._metrics = metrics
        self._guard = guard or Guard(metrics)
        self._residency = Residency(
            capacity=info.capacity_chunks, store_threshold=info.store_threshold
        )
        # One offset for the whole run: a clock that jumps must not reorder records.
        self._wall_offset_ns = (
            time.time_ns() - time.monotonic_ns() if wall_offset_ns is None else wall_offset_ns
        )
        self._open: OrderedDict[str, OpenRequest] = OrderedDict()
        self._finished: deque[OpenRequest] = deque()
        self._store_jobs: transfers.Jobs[Store] = transfers.Jobs()
        self._load_jobs: transfers.Jobs[Load] = transfers.Jobs()
        self._identities = Identities(info.layout, metrics)
        self._economics = Economics(info, metrics)
        self._emitter = self._emits(
            info, metrics, sinks, self._residency, self._wall, sample_rate, self._guard,
            self._identities, self._economics,
        )  # fmt: skip
        self._count = accounting.Counters(info.layout, metrics)
        self._handlers: dict[int, Callable[[Any], None]] = {
            facts.ADDED: self._added,
            facts.LOOKUP: self._looked_up,
            facts.ADMITTED: self._admitted,
            facts.OFFERED: self._offered,
            facts.STORE_JOB: self._store_job,
            facts.STORED: self._stored,
            facts.LOADED: self._loaded,
            facts.TRANSFERRED: self._transferred,
            facts.FINISHED: self._finish,
            facts.PREEMPTED: self._preempted,
            facts.RESET: self._reset,
            facts.ERROR: self._error,
            facts.LOST: self._lost,
            facts.FALLBACK: self._fell_back,
            facts.STARTED: self._started,
            facts.STEP: self._economics.step,
            facts.TIERS: self._tiers,
            facts.FAILED: self._failed,
        }

    @property
    def residency(self) -> Residency:
        """Residency as of the last fact handled."""
        return self._residency

    def _wall(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self._wall_offset_ns) / 1e9

    def handle(self, fact: tuple[Any, ...]) -> None:
        """Replay one fact."""
        self._handlers[fact[0]](facts.parse(fact))

    def tick(self, now_ns: int) -> None:
        """Emit requests whose stores have settled, and report long deferrals."""
        while self._finished and self._due(self._finished[0], now_ns):
            self._guard(self._emitter.emit, self._finished.popleft())
        waiting = 0
        for request in self._open.values():
            if request.deferred_since_ns is None:
                continue
            waiting += 1
            self._guard(self._emitter.report_deferral, request, now_ns)
        self._count.gauges(self._residency, waiting)
        self._economics.gauges()
        self._identities.check(self._residency)

    def flush(self) -> None:
        """Emit all finished requests now."""
        while self._finished:
            self._guard(self._emitter.emit, self._finished.popleft())

    def _due(self, request: OpenRequest, now_ns: int) -> bool:
        age = now_ns - request.emit_at_ns
        return age >= LINGER_NS or (age >= SETTLE_NS and not request.pending_jobs)

    def _added(self, fact: facts.Added) -> None:
        trace_id, parent = parent_ids(fact.trace_headers)
        self._open[fact.request_id] = OpenRequest(fact, trace_id, parent)
        if len(self._open) > MAX_OPEN:
            self._guard(self._emitter.emit, self._open.popitem(last=False)[1])

    def _looked_up(self, fact: facts.LookedUp) -> None:
        request = self._open.get(fact.request_id)
        if request is None:
            return
        request.asked = fact
        signature = lookups.signature(fact)
        if fact.result is None and signature == request.signature:
            last = request.lookups[-1]
            last.count += 1
            last.last_time = self._wall(fact.time_ns)
            self._deferred(request, last.exit)
            return
        if request.answer is not None and not request.answer.counted:
            self._not_taken(request, request.answer)
        request.attempts += 1
        lookup = self._read(fact, request)
        request.note(lookup)
        if Exit(lookup.exit) in DEFERRED_EXITS:
            request.signature, request.not_taken = signature, None
            if request.deferred_since_ns is None:
                request.deferred_since_ns = request.next_deferral_ns = fact.time_ns
            self._deferred(request, lookup.exit)
            return
        request.signature = None
        self._resume(request, fact.time_ns)
        request.answer = Answer(fact, lookup)
        self._check(fact, lookup)
        if not request.admitted:
            self._emitter.weigh(request.answer, request)

    def _read(self, fact: facts.LookedUp, request: OpenRequest) -> Lookup:
        return lookups.read(self._info.layout, fact, request.added, request.attempts, self._wall)

    def _check(self, fact: facts.LookedUp, lookup: Lookup) -> None:
        """Hold what was found against what is known to be there."""
        self._identities.lookup(lookup)
        for kv_group, keys in lookups.found_prefixes(self._info.layout, fact):
            if found := self._residency.confirmed(keys):
                self._identities.found(kv_group, found, self._residency)

    def _deferred(self, request: OpenRequest, how: str) -> None:
        request.deferrals += 1
        request.deferred_exit = how
        self._count.exit(Exit(how))

    def _not_taken(self, request: OpenRequest, answer: Answer) -> None:
        """Answered before, not admitted, asked again: no blocks free, or another connector waits.

        That may go on at every step for minutes, so that identical answers become one lookup.
        """
        lookup, signature = answer.lookup, lookups.signature(answer.fact)
        if answer.fact.result:
            lookup.exit = str(Exit.NOT_ADMITTED)
        self._count.answered(answer, request.trace_id)
        if signature == request.not_taken:
            request.lookups.pop()
            same = request.lookups[-1]
            same.count += 1
            same.last_time = lookup.time
        request.not_taken = signature

    def _resume(self, request: OpenRequest, now_ns: int) -> None:
        if request.deferred_since_ns is not None:
            waited = now_ns - request.deferred_since_ns
            request.deferral_ns += waited
            request.deferred_since_ns = None
            self._metrics.observe(semconv.DEFERRAL_SECONDS, waited / 1e9, trace_id=request.trace_id)

    def _admitted(self, fact: facts.Admitted) -> None:
        request = self._open.get(fact.request_id)
        if request is None:
            return
        if fact.job_id is not None:
            self._economics.loading(fact.load_keys, request)
            load = Load(
                job_id=fact.job_id,
                time=self._wall(fact.time_ns),
                groups=transfers.loaded_groups(fact.load_keys),
                synchronous=fact.synchronous,
            )
            request.loads.append(load)
            self._load_jobs.start(transfers.Job(fact.job_id, fact.request_id, fact.load_keys, load))
        answer, request.not_taken = request.answer, None
        if answer is None or answer.counted:
            return
        if fact.other_tokens:
            answer.lookup.exit = str(Exit.OTHER_CONNECTOR)
        elif answer.fact.result and not fact.external_tokens:
            answer.lookup.exit = str(Exit.NOT_ADMITTED)
        self._count.answered(answer, request.trace_id)
        if not request.admitted:
            request.admitted = True
            request.served = fact.external_tokens
            request.admission = request.loads[-1] if fact.job_id is not None else None
            request.local_tokens = fact.local_tokens
            request.other_tokens = fact.other_tokens
            request.other_connector = bool(fact.other_tokens)
            self._emitter.judge(request)

    def _offered(self, fact: facts.Offered) -> None:
        store = self._count.offer(fact, self._residency, self._wall(fact.time_ns))
        self._residency.offered(fact.offered, fact.accepted, fact.evicted)
        request = self._find(fact.request_id)
        self._economics.offered(fact, request)
        if fact.evicted:
            self._identities.evicted(facts.count_by_group(fact.evicted))
        if request is not None:
            request.stores.append(store)
            if request.finished is not None and fact.accepted and request.unwritten is None:
                request.unwritten = accounting.unwritten_chunk(
                    self._info.layout, request.finished, fact.accepted
                )

    def _find(self, request_id: str) -> OpenRequest | None:
        """An open request, or one that finished but still waits for its last stores."""
        request = self._open.get(request_id)
        if request is None:
            request = next((r for r in self._finished if r.request_id == request_id), None)
        return request

    def _store_job(self, fact: facts.StoreJob) -> None:
        request = self._find(fact.request_id)
        store = next(
            (s for s in reversed(request.stores) if s.job_id is None and not s.refused), None
        ) if request is not None else None  # fmt: skip
        if request is None or store is None:
            return
        store.job_id = fact.job_id
        request.pending_jobs += 1
        self._store_jobs.start(transfers.Job(fact.job_id, fact.request_id, fact.keys, store))

    def _stored(self, fact: facts.Stored) -> None:
        self._residency.stored(fact.keys, fact.success)
        if fact.success:
            self._identities.stored(self._count.chunks(semconv.STORED_CHUNKS, fact.keys))
        job = self._store_jobs.of_keys(fact.keys)
        if job is None:
            return
        job.record.failed = not fact.success
        job.record.completed_at = self._wall(fact.time_ns)
        self._observe_transfer(job, semconv.DIRECTION_STORE)
        self._store_jobs.end(job)
        if (request := self._find(job.request_id)) is not None:
            request.pending_jobs -= 1

    def _loaded(self, fact: facts.Loaded) -> None:
        job = self._load_jobs.of_keys(fact.keys)
        if job is not None and job.record.failed:
            self._not_loaded(job, self._wall(fact.time_ns))
            return
        self._count.chunks(semconv.SERVED_CHUNKS, fact.keys)
        if job is None:
            return
        job.record.completed_at = self._wall(fact.time_ns)
        job.record.latency = max(0.0, job.record.completed_at - job.record.time)
        if not job.record.synchronous:
            self._metrics.observe(
                semconv.RELOAD_LATENCY, job.record.latency, trace_id=self._trace_of(job)
            )
        self._observe_transfer(job, semconv.DIRECTION_LOAD)
        self._load_jobs.end(job)

    def _failed(self, fact: facts.Failed) -> None:
        """A worker failed to transfer these; what else they come to, the manager is told."""
        for job_id in fact.job_ids:
            job = self._store_jobs.of_id(job_id) or self._load_jobs.of_id(job_id)
            if job is not None:
                job.record.failed = True

    def _not_loaded(self, job: transfers.Job[Load], completed_at: float) -> None:
        job.record.completed_at = completed_at
        self._load_jobs.end(job)
        request = self._find(job.request_id)  # vLLM may have ended it for this
        if request is not None and request.admission is job.record:
            request.load_failed()

    def _transferred(self, fact: facts.Transferred) -> None:
        job = self._store_jobs.of_id(fact.job_id) or self._load_jobs.of_id(fact.job_id)
        if job is not None:
            # Each worker may report in a step of its own; the slowest is as long as it all took.
            record = job.record
            record.bytes = (record.bytes or 0) + fact.bytes
            record.transfer_seconds = max(record.transfer_seconds or 0.0, fact.seconds)

    def _observe_transfer(self, job: transfers.Job[Any], direction: str) -> None:
        """All workers have done their part of a job."""
        if (seconds := job.record.transfer_seconds) is not None:
            trace_id = self._trace_of(job)
            self._metrics.observe(semconv.TRANSFER_SECONDS, seconds, (direction,), trace_id)

    def _trace_of(self, job: transfers.Job[Any]) -> str:
        request = self._open.get(job.request_id)
        return request.trace_id if request is not None else ""

    def _preempted(self, fact: facts.Preempted) -> None:
        for request_id in fact.request_ids:
            if (request := self._open.get(request_id)) is not None:
                request.preemptions += 1

    def _reset(self, fact: facts.Reset) -> None:
        self._count.reset(self._residency)
        self._residency.reset()
        self._identities.reset()
        self._economics.reset()
        self._store_jobs.clear()
        self._load_jobs.clear()

    def _error(self, fact: facts.ObserverError) -> None:
        self._guard.note(f"{fact.text.partition(':')[0]} in {fact.where}", fact.text)

    def _lost(self, fact: facts.Lost) -> None:
        self._metrics.count(semconv.DROPPED_FACTS, fact.dropped)
        self._emitter.dropped_facts += fact.dropped
        if fact.state_lost:
            self._residency.new_epoch()

    def _fell_back(self, fact: facts.FellBack) -> None:
        self._metrics.gauge(semconv.LOOKUP_FALLBACK, int(fact.active), (fact.reason,))

    def _started(self, fact: facts.Started) -> None:
        for request_id, tokens in fact.requests:
            request = self._open.get(request_id)
            if request is not None and request.started is None:
                request.started, request.started_ns = tokens, fact.time_ns

    def _tiers(self, fact: facts.Tiers) -> None:
        if (request := self._open.get(fact.request_id)) is not None:
            self._economics.tiers(fact, request)

    def _finish(self, fact: facts.Finished) -> None:
        request = self._open.pop(fact.request_id, None)
        if request is None:
            return
        request.finished = fact
        request.emit_at_ns = fact.time_ns
        self._resume(request, fact.time_ns)  # waits that end without an answer count as well
        if request.answer is not None and not request.answer.counted:
            if request.answer.fact.result:
                request.answer.lookup.exit = str(Exit.NOT_ADMITTED)
            self._count.answered(request.answer, request.trace_id)
        self._note_computed(request, fact)
        self._finished.append(request)

    def _note_computed(self, request: OpenRequest, fact: facts.Finished) -> None:
        accounting.note_computed(self._info, self._residency, request, fact)
