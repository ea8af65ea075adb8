"""Records of an engine of which only the public connector interface is seen.

The same facts, records and numbers as at ``groups`` depth, less what only vLLM's own
search tells: no group queries, no vetoes, no causes. What could have been served is
estimated from what this engine computed before (:mod:`prefixes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly import lookups
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.assembly.emission import Emitter
from kvlens.telemetry.assembly.open_request import Answer, OpenRequest
from kvlens.telemetry.records import Load, Lookup
from kvlens.telemetry.semconv import DEFERRED_EXITS, Exit
from kvlens.telemetry.state.prefixes import KnownPrefixes
from kvlens.telemetry.verdict import judge_interface
from kvlens.telemetry.verdict.case import Case

Hashes = tuple[Any, int]
"""A request's list of block hashes, and its length at the time of the fact."""


def _hashes(keys: facts.KeyLists) -> Any:
    names, length = keys[0]
    return names[:length]


class InterfaceEmitter(Emitter):
    """Judges by what was computed before, not by what is stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes = KnownPrefixes(self._info.layout, self._info.store_threshold)
        self._evicted: dict[str, int] = {}
        """Expected tokens of open requests that are known to be evicted."""

    def weigh(self, answer: Answer, request: OpenRequest) -> None:
        """Expected tokens of a lookup; servable is what was answered, nothing else is known."""
        fact = answer.fact
        hashes = _hashes(fact.keys)
        answer.servable = fact.result or 0
        answer.seen_before = self.prefixes.seen(hashes, fact.num_tokens)
        if request.added.skip_reading:
            return
        kept, computed = self.prefixes.expected(hashes, fact.local_tokens, fact.num_tokens)
        cap = request.added.max_load_tokens
        answer.expected = kept if cap is None else min(kept, cap)
        self._evicted[request.request_id] = computed - kept

    def judge(self, request: OpenRequest, unresolved: bool = False) -> None:
        """Verdict of a request, with confidence ``likely`` and without a cause."""
        info, answer = self._info, request.answer or self._waiting(request)
        last = request.lookups[-1] if request.lookups else None
        request.case = Case(
            layout=info.layout,
            prompt_tokens=request.added.prompt_tokens,
            num_tokens=answer.fact.num_tokens if answer else request.added.prompt_tokens,
            local=answer.fact.local_tokens if answer else 0,
            served=request.served,
            servable=request.served,
            expected=max(answer.expected, request.served) if answer else 0,
            residency_known=False,
            seen_before=answer.seen_before if answer else False,
            exit=answer.lookup.exit if answer else None,
            skip_reading=request.added.skip_reading,
            other_connector=request.other_connector,
            deferral_seconds=request.deferral_ns / 1e9,
            deferrals=request.deferrals,
            deferred_exit=request.deferred_exit,
            unresolved=unresolved or (last is not None and Exit(last.exit) in DEFERRED_EXITS),
        )
        evicted = self._evicted.get(request.request_id, 0)
        request.judgement = judge_interface.judge(
            request.case, info.connector, self.prefixes.unit, evicted, request.failed_tokens
        )

    def emit(self, request: OpenRequest) -> None:
        """Emit a finished request."""
        if request.failed_tokens:
            self.judge(request)  # a load may fail after the request was admitted and judged
        super().emit(request)
        self._evicted.pop(request.request_id, None)

    def _note_held_back(self, request: OpenRequest) -> None:
        """Nothing is known of chunks that were not offered."""


class InterfaceAssembler(Assembler):
    """Replays the facts of the public interface."""

    _emits = InterfaceEmitter
    _emitter: InterfaceEmitter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loading: dict[str, Load] = {}
        more: dict[int, Callable[[Any], None]] = {
            facts.RECEIVED: self._received,
            facts.LOAD_FAILED: self._load_failed,
        }
        self._handlers.update(more)

    def _read(self, fact: facts.LookedUp, request: OpenRequest) -> Lookup:
        lookup = lookups.read(self._info.layout, fact, request.added, request.attempts, self._wall)
        lookup.groups, lookup.vetoing_group = [], None
        if fact.result is None:
            lookup.exit = str(Exit.DEFERRED_BACKEND)
        return lookup

    def _check(self, fact: facts.LookedUp, lookup: Lookup) -> None:
        """There are no group queries to hold the answer against."""

    def _admitted(self, fact: facts.Admitted) -> None:
        super()._admitted(fact._replace(job_id=None))
        request = self._open.get(fact.request_id)
        if request is None or fact.job_id is None:
            return
        load = Load(job_id=fact.job_id, time=self._wall(fact.time_ns), synchronous=fact.synchronous)
        request.loads.append(load)
        self._loading[fact.request_id] = load

    def _received(self, fact: facts.Received) -> None:
        for request_id in fact.request_ids:
            load = self._loading.pop(request_id, None)
            if load is None:
                continue
            load.completed_at = self._wall(fact.time_ns)
            load.latency = max(0.0, load.completed_at - load.time)
            request = self._open.get(request_id)
            if not load.synchronous:
                self._metrics.observe(
                    semconv.RELOAD_LATENCY, load.latency,
                    trace_id=request.trace_id if request is not None else "",
                )  # fmt: skip

    def _load_failed(self, fact: facts.LoadFailed) -> None:
        load = self._loading.pop(fact.request_id, None)
        if load is not None:
            load.failed, load.completed_at = True, self._wall(fact.time_ns)
        if (request := self._open.get(fact.request_id)) is not None:
            request.load_failed()

    def _offered(self, fact: facts.Offered) -> None:
        super()._offered(fact)
        for key in fact.evicted:
            self._emitter.prefixes.evicted(key)

    def _reset(self, fact: facts.Reset) -> None:
        super()._reset(fact)
        self._emitter.prefixes.reset()

    def _note_computed(self, request: OpenRequest, fact: facts.Finished) -> None:
        tokens = fact.computed_tokens
        if self._info.offload_prompt_only:
            tokens = min(tokens, request.added.prompt_tokens)
        if (most := request.added.max_offload_tokens) is not None:
            tokens = min(tokens, most)
        self._loading.pop(fact.request_id, None)
        self._emitter.prefixes.computed(_hashes(fact.keys), tokens, fact.num_tokens)
