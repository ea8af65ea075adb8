"""Appends facts on the scheduler thread, and nothing else.

Every method here is called between two of vLLM's own steps. None raises, none
blocks, none asks the offloading manager anything. What a fact costs is one
tuple; all thinking happens on the drain thread. (From 0.33 on a tiered manager
may also complete stores on a thread of its own, under the manager's lock, so
facts about the manager stay in the order in which they became true.)
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.v1.request import RequestStatus

from kvlens.telemetry import facts
from kvlens.telemetry.costs import MIN_TOKENS as PREFILL_TOKENS
from kvlens.telemetry.guard import raise_errors as raise_errors

P = ParamSpec("P")
Hook = TypeVar("Hook", bound="Observer")
_MAX_STEPS = 64
"""Steps in flight; more than a pipeline holds, in case an output never comes."""
_KEEPS_RESIDENCY = frozenset({"offered", "promoted", "scheduled", "stored", "reset"})
"""Hooks without which the map of the offload tier is wrong."""


class Sink(Protocol):
    """Where facts go (``telemetry.recorder.Recorder``)."""

    def append(self, fact: tuple[Any, ...]) -> None:
        """Take one fact; never raises, never blocks."""


def contained(
    method: Callable[Concatenate[Hook, P], None],
) -> Callable[Concatenate[Hook, P], None]:
    """Keep any error of ours away from vLLM: it is told once, and the hook is off from then on."""
    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Hook, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if name in self.off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self._contain(name, error)

    return guarded


class Observer:
    """Turns what the scheduler does into facts."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.queries: list[tuple[Sequence[bytes], int | None, int | None]] = []
        """Queries of the lookup that runs now, (keys, hits, window); the innermost hooks add."""
        self.off: set[str] = set()
        """Hooks that raised: they are left out for the rest of the process."""
        self._steps: deque[tuple[int, int]] = deque(maxlen=_MAX_STEPS)
        """Steps whose output is awaited: (scheduled at, tokens beyond one per request)."""
        self._step_ended = 0

    def _contain(self, where: str, error: Exception) -> None:
        """Keep an error of ours away from vLLM: it becomes a fact, and the hook is off."""
        if raise_errors():
            raise error
        self.off.add(where)
        with contextlib.suppress(Exception):
            text = f"{type(error).__name__}: {error}; this hook is off until the engine restarts"
            self.sink.append((facts.ERROR, time.monotonic_ns(), where, text))
            if where in _KEEPS_RESIDENCY:  # from here on nobody knows what is stored
                self.sink.append((facts.LOST, time.monotonic_ns(), 0, True))

    def status(self, scheduler: Any, request: Any) -> Any:
        """vLLM's own state of a request; None if it has none, or has it elsewhere."""
        if "status" in self.off:
            return None
        try:
            return scheduler._req_status.get(request.request_id)
        except Exception as error:  # noqa: BLE001
            self._contain("status", error)
            return None

    @contained
    def keep_keys(self, status: Any) -> None:
        """Leave the key lists that facts refer to as they are: 0.34 clears those of a request
        whose hashes look ahead and which goes on with other tokens than it had.
        """
        for state in getattr(status, "group_states", ()):
            state.offload_keys = list(state.offload_keys)

    @contained
    def added(self, request: Any, status: Any) -> None:
        """A request reached the scheduler."""
        self.sink.append(
            (
                facts.ADDED,
                monotonic_ns(),
                request.request_id,
                request.arrival_time,
                request.num_prompt_tokens,
                getattr(request, "trace_headers", None),
                _reads_no_tier(request),
                getattr(status, "max_offload_tokens", None),
                getattr(status, "max_load_tokens", None),
            )
        )

    def asked(self, args: Any, kwargs: Any, hits: int | None) -> None:
        """A group that needs everything from the start was asked for ``args[0]``."""
        # Contained by hand, as all that lookups wait for.
        if "asked" not in self.off:
            try:
                self.queries.append((args[0] if args else kwargs["keys"], hits, None))
            except Exception as error:  # noqa: BLE001
                self._contain("asked", error)

    def asked_window(self, args: Any, kwargs: Any, hits: int | None) -> None:
        """A windowed group was asked for ``args[0]``, as many in a row as ``args[1]``."""
        if "asked_window" not in self.off:
            try:
                keys = args[0] if args else kwargs["keys"]
                window = args[1] if len(args) > 1 else kwargs["sliding_window_size"]
                self.queries.append((keys, hits, window))
            except Exception as error:  # noqa: BLE001
                self._contain("asked_window", error)

    def looked_up(
        self,
        start_ns: int,
        request: Any,
        status: Any,
        local_tokens: int,
        result: int | None,
        in_transfer: bool,
        max_new_tokens: int | None,
    ) -> None:
        """A lookup was answered or deferred."""
        # Contained by hand, and no call that can be spared: this is all that lookups wait for.
        if status is None or "looked_up" in self.off:
            return
        try:
            self.sink.append(
                (
                    facts.LOOKUP,
                    start_ns,
                    request.request_id,
                    monotonic_ns(),
                    local_tokens,
                    request.num_tokens,
                    result,
                    [(keys[0], len(keys), hits, win) for keys, hits, win in self.queries if keys],
                    [(g.offload_keys, len(g.offload_keys)) for g in status.group_states],
                    in_transfer,
                    getattr(status, "partial_tail_boundary", None),
                    load_cap(status, max_new_tokens),
                )
            )
        except Exception as error:  # noqa: BLE001
            self._contain("looked_up", error)

    @contained
    def admitted(self, request: Any, external_tokens: int, scheduler: Any) -> None:
        """Blocks were allocated for a request, with ``external_tokens`` to load."""
        job_id = None
        keys: facts.Keys = ()
        synchronous = False
        if external_tokens:
            job_id = next(reversed(scheduler._current_batch_load_jobs))
            job = scheduler._jobs[job_id]
            keys, synchronous = job.keys, getattr(job, "is_sync_load", False)
        self.sink.append(
            (
                facts.ADMITTED,
                monotonic_ns(),
                request.request_id,
                external_tokens,
                job_id,
                keys,
                synchronous,
                *own_account(request, external_tokens),
            )
        )

    @contained
    def offered(self, keys: facts.Keys, req_context: Any, output: Any) -> None:
        """Keys were offered to the manager; ``output`` None means refused."""
        accepted = None if output is None else output.keys_to_store
        evicted = () if output is None else output.evicted_keys
        self.sink.append(
            (facts.OFFERED, monotonic_ns(), req_context.req_id, keys, accepted, evicted)
        )

    @contained
    def promoted(self, keys: facts.Keys, _req_context: Any, output: Any) -> None:
        """Keys were to be brought up from a lower tier; no request stores them."""
        accepted = None if output is None else output.keys_to_store
        evicted = () if output is None else output.evicted_keys
        self.sink.append((facts.OFFERED, monotonic_ns(), "", keys, accepted, evicted))

    @contained
    def stored(self, keys: facts.Keys, success: bool) -> None:
        """The manager was told that a store completed."""
        self.sink.append((facts.STORED, monotonic_ns(), keys, success))

    @contained
    def loaded(self, keys: facts.Keys) -> None:
        """The manager was told that a load completed."""
        self.sink.append((facts.LOADED, monotonic_ns(), keys))

    @contained
    def scheduled(self, meta: Any, scheduler_output: Any, scheduler: Any) -> None:
        """A step left the scheduler: its store jobs and preemptions."""
        if meta.store_jobs:
            now = monotonic_ns()
            for job_id, job in meta.store_jobs.items():
                status = scheduler._jobs.get(job_id)
                if status is not None:
                    self.sink.append((facts.STORE_JOB, now, job.req_id, job_id, status.keys))
        self.note_step(scheduler_output)

    def note_step(self, scheduler_output: Any) -> None:
        """What a step's output tells of requests: preempted, started, tokens computed."""
        preempted = scheduler_output.preempted_req_ids
        if preempted:
            self.sink.append((facts.PREEMPTED, monotonic_ns(), tuple(preempted)))
        if new := scheduler_output.scheduled_new_reqs:
            started = [(data.req_id, data.num_computed_tokens) for data in new]
            self.sink.append((facts.STARTED, monotonic_ns(), started))
        if tokens := scheduler_output.total_num_scheduled_tokens:
            beyond = tokens - len(scheduler_output.num_scheduled_tokens)
            self._steps.append((monotonic_ns(), beyond))

    @contained
    def tiers(self, request: Any, tokens: Any) -> None:
        """vLLM asked which tiers an admitted request loads from."""
        names = {str(getattr(tier, "value", tier)): count for tier, count in tokens.items()}
        self.sink.append((facts.TIERS, monotonic_ns(), request.request_id, names))

    @contained
    def stepped(self) -> None:
        """The output of the oldest step that computes anything has come back."""
        if not self._steps:
            return
        scheduled, tokens = self._steps.popleft()
        ended, began = monotonic_ns(), max(scheduled, self._step_ended)
        self._step_ended = ended
        if tokens >= PREFILL_TOKENS:
            self.sink.append((facts.STEP, ended, (ended - began) / 1e9, tokens))

    @contained
    def transferred(self, connector_output: Any) -> None:
        """Workers reported finished jobs with their own measurements."""
        meta = connector_output.kv_connector_worker_meta
        transfers = getattr(meta, "transfers", None)
        if transfers:
            now = monotonic_ns()
            for job_id, (size, seconds) in transfers.items():
                self.sink.append((facts.TRANSFERRED, now, job_id, size, seconds))
        if failed := getattr(meta, "failed_jobs", None):
            self.sink.append((facts.FAILED, monotonic_ns(), tuple(failed)))
        for what, count in getattr(meta, "errors", {}).items():
            for _ in range(count):
                self.sink.append((facts.ERROR, monotonic_ns(), "worker", what))

    @contained
    def finished(self, request: Any, status: Any) -> None:
        """A request ended; its blocks are still there."""
        tokens, computed = request.num_tokens, computed_tokens(request)
        self.sink.append(
            (
                facts.FINISHED,
                monotonic_ns(),
                request.request_id,
                str(request.get_finished_reason() or ""),
                tokens,
                computed,
                [(state.offload_keys, len(state.offload_keys)) for state in status.group_states],
            )
        )

    @contained
    def failed(self, where: str, error: Exception) -> None:
        """An error of ours was contained elsewhere; the engine goes on without what failed."""
        text = f"{type(error).__name__}: {error}"
        self.sink.append((facts.ERROR, monotonic_ns(), where, text))

    @contained
    def fell_back(self, reason: str, active: bool, text: str) -> None:
        """vLLM's own lookup is used instead of the configured one, or no longer is."""
        self.sink.append((facts.FALLBACK, monotonic_ns(), str(reason), active, text))

    @contained
    def reset(self) -> None:
        """The offload tier was emptied."""
        self.sink.append((facts.RESET, monotonic_ns()))


def _reads_no_tier(request: Any) -> bool:
    """Whether a request loads nothing, by its own parameters; 0.34 has a name for it."""
    older = getattr(request, "skip_reading_prefix_cache", False)
    return bool(getattr(request, "skip_reading_external_kv", older))


def load_cap(req_status: Any, max_new_tokens: int | None) -> int | None:
    """Cap on tokens loadable beyond the local ones, None if there is none."""
    cap: int | None = getattr(req_status, "max_load_tokens", None)
    if cap is None or (max_new_tokens is not None and max_new_tokens < cap):
        return max_new_tokens
    return cap


def computed_tokens(request: Any) -> int:
    """Tokens of an ended request whose KV data is final: never the last sampled one."""
    computed = min(request.num_computed_tokens, request.num_tokens)
    if request.status is not RequestStatus.FINISHED_ABORTED:
        # One that ended in an error may not have come that far.
        computed = min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))
    return int(computed)


def own_account(request: Any, external_tokens: int) -> tuple[int | None, int]:
    """vLLM's own count of local tokens, and of those that another connector loads."""
    stats = getattr(request, "prefill_stats", None)
    if stats is None or not stats.num_prompt_tokens or request.num_preemptions:
        return None, 0  # it tells of the first admission only
    other = stats.num_external_cached_tokens - external_tokens
    return stats.num_local_cached_tokens, max(0, other)
