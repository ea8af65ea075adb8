"""Watching any connector through ``KVConnectorBase_V1``: the ``interface`` depth.

:func:`attach` wraps the public methods of one connector instance; what passes is told to
an :class:`InterfaceObserver`. No private name of vLLM is used.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from kvlens.connector.observer import Observer, Sink, computed_tokens, contained, own_account
from kvlens.telemetry import facts

_MAX_LOADING = 65_536
"""Loads in flight that are remembered; requests that never report would fill the memory."""


class InterfaceObserver(Observer):
    """Turns calls of the public interface into facts."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: set[str] = set()
        self._loads = 0
        self._answered: dict[str, tuple[int, bool]] = {}
        """Requests that were answered with tokens to load: when, and whether asynchronously."""
        self._loading: dict[str, Any] = {}
        """Requests whose load is under way, and the blocks it goes to."""
        self._synchronous: set[str] = set()

    @contained
    def came(self, request: Any) -> None:
        """A request reached the connector."""
        if request.request_id not in self._known:
            self._known.add(request.request_id)
            self.added(request, None)

    def matched(self, start_ns: int, request: Any, local_tokens: int, answer: Any) -> None:
        """The connector said how many tokens it can load."""
        # Contained by hand, as all that lookups wait for.
        if "matched" in self.off:
            return
        try:
            tokens, asynchronous = answer
            request_id = request.request_id
            if request_id not in self._known:
                self.came(request)
            hashes = request.block_hashes
            now = monotonic_ns()
            if tokens:
                self._answered[request_id] = now, bool(asynchronous)
                if len(self._answered) > _MAX_LOADING:
                    self._answered.pop(next(iter(self._answered)))
                most = request.num_tokens - local_tokens
                if not 0 <= tokens <= most:  # a connector may answer anything
                    tokens = max(0, min(tokens, most))
            self.sink.append(
                (
                    facts.LOOKUP,
                    start_ns,
                    request_id,
                    now,
                    local_tokens,
                    request.num_tokens,
                    tokens,
                    (),
                    [(hashes, len(hashes))],
                    False,
                    None,
                    None,
                )
            )
        except Exception as error:  # noqa: BLE001
            self._contain("matched", error)

    @contained
    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Blocks were allocated for a request, with ``external_tokens`` to load."""
        request_id = request.request_id
        answered, asynchronous = self._answered.pop(request_id, (monotonic_ns(), False))
        job_id = None
        if external_tokens > 0:
            self._loads += 1
            job_id = self._loads
            if len(self._loading) >= _MAX_LOADING:
                self._loading.pop(next(iter(self._loading)))
            self._loading[request_id] = blocks
            if not asynchronous:
                self._synchronous.add(request_id)
        # The load's time counts from the answer.
        when = answered if job_id is not None else monotonic_ns()
        self.sink.append(
            (
                facts.ADMITTED,
                when,
                request_id,
                max(0, external_tokens),
                job_id,
                (),
                not asynchronous,
                *own_account(request, external_tokens),
            )
        )

    @contained
    def stepping(self, scheduler_output: Any) -> None:
        """A step leaves the scheduler: who starts, who was preempted, what it computes."""
        self.note_step(scheduler_output)

    @contained
    def returned(self, connector_output: Any) -> None:
        """The output of a step came back: loads that arrived, blocks that did not."""
        self.stepped()
        received = set(connector_output.finished_recving or ()) | self._synchronous
        self._synchronous = set()
        invalid = connector_output.invalid_block_ids
        failed = self._with_blocks(invalid) if invalid and self._loading else set()
        # 0.34 names the requests themselves where the connector can.
        told = getattr(connector_output, "failed_recving", None) or ()
        failed |= {name for name in told if name in self._loading}
        for request_id in failed:
            self.sink.append((facts.LOAD_FAILED, monotonic_ns(), request_id))
        if arrived := [name for name in received - failed if name in self._loading]:
            self.sink.append((facts.RECEIVED, monotonic_ns(), arrived))
        for request_id in received | failed:
            self._loading.pop(request_id, None)

    def _with_blocks(self, block_ids: set[int]) -> set[str]:
        return {
            request_id
            for request_id, blocks in self._loading.items()
            if any(not block_ids.isdisjoint(table) for table in blocks.get_block_ids())
        }

    @contained
    def after(self, note: Note, args: tuple[Any, ...], answer: Any) -> None:
        """A call returned: note it, if it has the arguments that it should have."""
        note(self, args, answer)

    @contained
    def ended(self, request: Any) -> None:
        """A request ended; its blocks are still there."""
        request_id = request.request_id
        self._known.discard(request_id)
        self._answered.pop(request_id, None)
        self._loading.pop(request_id, None)
        self._synchronous.discard(request_id)
        hashes = request.block_hashes
        self.sink.append(
            (
                facts.FINISHED,
                monotonic_ns(),
                request_id,
                str(request.get_finished_reason() or ""),
                request.num_tokens,
                computed_tokens(request),
                [(hashes, len(hashes))],
            )
        )


def attach(connector: Any, watcher: InterfaceObserver) -> None:
    """Tell ``watcher`` of every call of ``connector`` that it wants to know of.

    The instance's methods are wrapped, so that its class, and what vLLM finds out from
    that, stay as they are. A wrapper calls the connector first (but for outputs, which
    are noted before it acts on them) and passes arguments and answer on untouched.
    """
    lookup = connector.get_num_new_matched_tokens

    def get_num_new_matched_tokens(
        request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        start = monotonic_ns()
        answer = lookup(request, num_computed_tokens, *args, **kwargs)
        watcher.matched(start, request, num_computed_tokens, answer)
        return answer

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    for name, note in _AFTER.items():
        if (method := getattr(connector, name, None)) is not None:
            setattr(connector, name, _then(method, watcher, note))
    output = connector.update_connector_output

    def update_connector_output(connector_output: Any, *args: Any, **kwargs: Any) -> Any:
        watcher.returned(connector_output)
        return output(connector_output, *args, **kwargs)

    connector.update_connector_output = update_connector_output


Note = Callable[[InterfaceObserver, tuple[Any, ...], Any], None]
"""Told of a call's positional arguments and its answer."""

_AFTER: dict[str, Note] = {
    "on_new_request": lambda watcher, args, _: watcher.came(args[0]),
    "update_state_after_alloc": lambda watcher, args, _: watcher.allocated(*args[:3]),
    "build_connector_meta": lambda watcher, args, _: watcher.stepping(args[0]),
    "request_finished": lambda watcher, args, _: watcher.ended(args[0]),
    "request_finished_all_groups": lambda watcher, args, _: watcher.ended(args[0]),
    "get_external_cache_hit_sources": lambda watcher, args, found: watcher.tiers(args[0], found),
    "reset_cache": lambda watcher, args, _: watcher.reset(),
}


def _then(method: Callable[..., Any], watcher: InterfaceObserver, note: Note) -> Any:
    """``method``, and then ``note``; vLLM passes these arguments by position or by name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        answer = method(*args, **kwargs)
        watcher.after(note, (*args, *kwargs.values()), answer)
        return answer

    return call
