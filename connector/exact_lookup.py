"""Lookups that serve the largest safe boundary (``exact``), or vLLM's if it is safe.

Both modes stand between vLLM's search and its caller::

    exact       the largest boundary that can be served, by a search of our own
    corrected   vLLM's own answer; where that boundary cannot be served (a recurrent
                group has no state there, or a window is not all stored), the
                largest one that can, searched over what was asked already

What is answered is remembered until the load begins: vLLM must then ask for chunks
that this attempt has found and for no others, since one that is not there ends the
engine. An invariant that fails hands the engine back to vLLM's search for good.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import make_offload_key

from kvlens.connector import compat, layout
from kvlens.connector.boundary import HIT, Keys, Rules, Search, UnconfirmedError
from kvlens.connector.config import ConnectorSettings, LookupMode
from kvlens.connector.fallback import StockFallback
from kvlens.connector.observer import raise_errors
from kvlens.telemetry.facts import group_of

SEARCH = (
    "_lookup_complete_chunks"
    if hasattr(OffloadingConnectorScheduler, "_lookup_complete_chunks")
    else "_lookup"
)
"""vLLM's search over complete chunks: 0.28 split it off, to extend its answer by a partial tail."""


class _Answer(NamedTuple):
    """What was answered to a request, until its blocks are allocated."""

    keys: Keys
    local: int
    boundary: int


def _keys(status: Any) -> Keys:
    return [state.offload_keys for state in status.group_states]


class _Remembering:
    """An offloading manager that asks for no key twice in one search."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.known: dict[bytes, Any] = {}

    def lookup(self, key: bytes, context: Any) -> Any:
        """Answer for ``key``, as it was when it was asked for first."""
        answer = self.known.get(key)
        if answer is None:
            answer = self.known[key] = self._manager.lookup(key, context)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class BoundaryLookup:
    """The lookups of one ``OffloadingConnectorScheduler``."""

    def __init__(self, scheduler: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        """Describe the scheduler's groups and watch what its manager is asked to load."""
        self._scheduler = scheduler
        self._exact = settings.lookup is LookupMode.EXACT
        groups = scheduler.config.kv_group_configs
        self._rules = Rules.of(
            layout.describe(scheduler, kv_cache_config),
            [group.sliding_window_size_in_chunks for group in groups],
        )
        self._step = lcm(*(group.tokens_per_block for group in groups))
        self._positions = {group.group_idx: index for index, group in enumerate(groups)}
        self._vllm_is_safe = self._trusts_vllm()
        self.remembering: _Remembering | None = None
        """What vLLM's search has asked of windowed groups, while it runs."""
        self._answers: dict[str, _Answer] = {}
        self._loading: _Answer | None = None
        """Answer to the request whose blocks are being allocated."""
        self._tail: set[bytes] = set()
        """Keys of its partial last block, found by vLLM beyond that answer."""
        self.fallback = StockFallback(settings.fallback_file)
        self._prepare_load = scheduler.manager.prepare_load
        scheduler.manager.prepare_load = self._checked_load

    def answer(
        self, status: Any, stock: Callable[[], int | None], max_new_tokens: int | None
    ) -> int | None:
        """Tokens to serve beyond the local ones; None to be asked again later.

        ``stock`` is vLLM's own search for the same request.
        """
        self._answers.pop(status.req.request_id, None)
        if self.fallback.active():
            return stock()
        if self._exact:
            return self._contained(self._largest, status, max_new_tokens)
        if self._vllm_is_safe:
            return stock()
        self.remembering = _Remembering(self._scheduler.manager)
        self._scheduler.prefix_scans = []
        try:
            found = stock()
            if not found:
                return found
            return self._contained(self._corrected, status, max_new_tokens, found)
        finally:
            self.remembering = self._scheduler.prefix_scans = None

    def begin_load(self, request: Any) -> None:
        """Blocks were allocated for this request; its load is prepared next."""
        self._loading = self._answers.pop(request.request_id, None)
        status = self._scheduler._req_status.get(request.request_id)
        tail = getattr(status, "partial_tail_boundary", None)
        if tail is not None:
            config = self._scheduler.config
            block_hash = request.block_hashes[tail // config.tokens_per_hash - 1]
            self._tail = {
                make_offload_key(block_hash, group.group_idx) for group in config.kv_group_configs
            }

    def end_load(self) -> None:
        """The load is prepared."""
        self._loading = None
        self._tail.clear()

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._answers.pop(request_id, None)

    def _contained(self, search: Callable[..., int | None], *args: Any) -> int | None:
        """Nothing is served, and vLLM searches from now on, if the search fails."""
        try:
            return search(*args)
        except Exception as error:
            if raise_errors():
                raise
            self._fail(error)
            return 0

    def _fail(self, error: Exception) -> None:
        observer = self._scheduler.observer
        if observer is not None:
            observer.failed("lookup", error)
        self.fallback.fail(error)

    def _trusts_vllm(self) -> bool:
        """Whether vLLM's boundary can always be served in this layout, so that it need not be
        looked at: full attention alone, or with states that end where its chunks do."""
        scheduler, rules = self._scheduler, self._rules
        return not rules.windowed or (
            all(rule.state and not rule.pop for rule in rules.windowed)
            and {rule.chunk for rule in rules.by_position} == {scheduler._mamba_align_size}
        )

    def _largest(self, status: Any, max_new_tokens: int | None) -> int | None:
        local = status.num_locally_computed_tokens
        if local % self._step:
            return 0  # a block that is only partly computed can be neither kept nor loaded
        search = self._search(status)
        boundary = search.largest(compat.load_cap(status, max_new_tokens))
        self._record(search, boundary, status)
        if boundary <= local:
            return 0
        if not search.certain(boundary):
            search.insist(boundary)
            return None
        answer = _Answer(_keys(status), local, boundary)
        if search.pending and not self._still_there(answer, status.req_context):
            return None
        being_loaded = self._scheduler._chunks_being_loaded
        if being_loaded and not being_loaded.isdisjoint(self._rules.needed(*answer)):
            return None
        self._answers[status.req.request_id] = answer
        return boundary - local

    def _corrected(self, status: Any, max_new_tokens: int | None, found: int) -> int | None:
        """vLLM's answer ``found``, or the largest that can be served where that one cannot."""
        assert self.remembering is not None
        local, known = status.num_locally_computed_tokens, self.remembering.known
        answer = _Answer(_keys(status), local, local + found)
        if local % self._step or not self._rules.stand(*answer, status.req.num_tokens, known):
            return self._largest(status, max_new_tokens)
        self._answers[status.req.request_id] = answer
        return found

    def _search(self, status: Any) -> Search:
        """A search over what this attempt has asked already, if anything."""
        scheduler = self._scheduler
        search = Search(
            self._rules,
            _keys(status),
            status.num_locally_computed_tokens,
            status.req.num_tokens,
            (self.remembering or scheduler.manager).lookup,
            status.req_context,
        )
        for keys, hits in scheduler.prefix_scans or ():
            if hits is not None and keys:
                search.learn(self._positions[group_of(keys[0])], len(keys), hits)
        return search

    def _still_there(self, answer: _Answer, context: Any) -> bool:
        """Whether chunks found in this attempt outlived it.

        A tiered manager starts to promote a chunk when it is asked for, and may evict
        for it what it has just reported as a hit. Its first tier can be asked without that.
        """
        primary = getattr(self._scheduler.manager, "primary_tier", None)
        return primary is None or all(
            primary.lookup(key, context) is HIT for key in self._rules.needed(*answer)
        )

    def _record(self, search: Search, boundary: int, status: Any) -> None:
        """Tell the observer and vLLM's event tracker what was asked and found."""
        scheduler = self._scheduler
        tracker = scheduler._events_tracker
        describing = getattr(tracker, "self_describing_enabled", True)
        observer = scheduler.observer
        if observer is None and not describing:
            return
        groups = scheduler.config.kv_group_configs
        for rule, keys, hits in search.queries(boundary):
            group = groups[rule.position]
            if observer is not None:
                observer.queries.append((keys, hits, group.sliding_window_size_in_chunks))
            if describing and group.sliding_window_size_in_chunks is None:
                start = status.num_locally_computed_tokens // rule.chunk
                for index, key in enumerate(keys[: hits or 0], start):
                    tracker.record_lookup(status.req, group, index, key)

    def _checked_load(self, keys: Any, context: Any) -> Any:
        """``prepare_load`` of the manager: it ends the engine over a chunk that is not there."""
        answer = self._loading
        if answer is not None and not self.fallback.active():
            expected = list(self._rules.needed(*answer))
            if keys != expected and (unconfirmed := set(keys).difference(expected, self._tail)):
                error = UnconfirmedError(
                    f"{len(unconfirmed)} chunks are to be loaded for a boundary of "
                    f"{answer.boundary} tokens that the lookup has not found"
                )
                if raise_errors():
                    raise error
                self._fail(error)
        return self._prepare_load(keys, context)


def apply(base: type[Any], settings: ConnectorSettings) -> type[Any]:
    """Subclass of an ``OffloadingConnectorScheduler`` class with the configured lookups."""
    if settings.lookup is LookupMode.STOCK:
        return base

    class WithBoundaryLookup(base):
        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, vllm_config, kv_cache_config)
            self.boundary_lookup = BoundaryLookup(self, kv_cache_config, settings)

        def _sliding_window_lookup(self, *args: Any, **kwargs: Any) -> int | None:
            # vLLM may ask a windowed group again in a later pass, and so may we.
            manager: Any = self.manager
            self.manager = self.boundary_lookup.remembering or manager
            try:
                found: int | None = super()._sliding_window_lookup(*args, **kwargs)
            finally:
                self.manager = manager
            return found

        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            self.boundary_lookup.begin_load(request)
            try:
                super().update_state_after_alloc(request, blocks, num_external_tokens)
            finally:
                self.boundary_lookup.end_load()

        def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
            self.boundary_lookup.forget(request.request_id)
            answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
            return answer

    stock = getattr(base, SEARCH)

    def search(
        self: Any, req_status: Any, max_num_new_tokens: int | None = None, **kwargs: Any
    ) -> int | None:
        if max_num_new_tokens is not None:
            kwargs["max_num_new_tokens"] = max_num_new_tokens
        answer: int | None = self.boundary_lookup.answer(
            req_status, lambda: stock(self, req_status, **kwargs), max_num_new_tokens
        )
        return answer

    setattr(WithBoundaryLookup, SEARCH, search)
    return WithBoundaryLookup
