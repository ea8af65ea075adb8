"""Lookups that serve the largest safe boundary (``exact``), or vLLM's if it is safe.

Both modes stand between vLLM's search and its caller::

    exact       the largest boundary that can be served, by a search of our own
    corrected   vLLM's own answer; where that boundary cannot be served (a recurrent
                group has no state there, or a window is not all stored), the
                largest one that can, searched on from what was asked already

What is answered is remembered until the load begins: vLLM must then ask for what
this attempt has found and for nothing else, since a chunk that is not there ends
the engine. An invariant that fails hands the engine back to vLLM's search for good.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

from kvlens.connector import compat, layout
from kvlens.connector.boundary import HIT, Keys, Rules, Search, UnconfirmedError
from kvlens.connector.config import ConnectorSettings, LookupMode
from kvlens.connector.fallback import StockFallback
from kvlens.connector.observer import load_cap, raise_errors
from kvlens.connector.partial_tail import PartialTails
from kvlens.telemetry.facts import group_of
from kvlens.telemetry.records import Layout


class _Answer(NamedTuple):
    """What was answered to a request, until its load is prepared."""

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

    def __init__(self, scheduler: Any, shape: Layout, settings: ConnectorSettings) -> None:
        """Take the scheduler's groups and watch what its manager is asked to load."""
        self._scheduler = scheduler
        groups = scheduler.config.kv_group_configs
        self._rules = Rules.of(shape, [group.sliding_window_size_in_chunks for group in groups])
        self._step = lcm(*(group.tokens_per_block for group in groups))
        self._positions = {group.group_idx: index for index, group in enumerate(groups)}
        self._tails = None
        if getattr(scheduler.config, "supports_partial_tail", False):
            self._tails = PartialTails(scheduler)
        self._exact = settings.lookup is LookupMode.EXACT
        self._vllm_is_safe = self._trusts_vllm()
        self.remembering: _Remembering | None = None
        """What vLLM's search has asked of windowed groups, while it runs."""
        self.fallback = StockFallback(settings.fallback_file)
        self.attention: int | None = None
        """How far attention alone reached in the last search of our own (``Search.attention``)."""
        self._answers: dict[str, _Answer] = {}
        self._confirmed: Callable[[], list[bytes]] | None = None
        """What was found for the request whose load is prepared next."""
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

    def finds_tails(self) -> bool:
        """Whether partial last blocks are looked for here, and not by vLLM."""
        return self._exact and self._tails is not None and not self.fallback.active()

    def begin_load(self, request: Any) -> None:
        """Blocks were allocated for this request; its load is prepared next."""
        answer = self._answers.pop(request.request_id, None)
        if answer is not None:
            status = self._scheduler._req_status.get(request.request_id)
            tail = getattr(status, "partial_tail_boundary", None)
            self._confirmed = lambda: self._loads(answer, tail, request)

    def end_load(self) -> None:
        """The load is prepared."""
        self._confirmed = None

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
        """Whether vLLM's boundary can always be served, so that it need not be looked at.

        That is so for full attention alone, and for recurrent groups whose states
        end where every group's chunks do.
        """
        rules = self._rules
        return not rules.windowed or (
            all(rule.state and not rule.pop for rule in rules.windowed)
            and {rule.chunk for rule in rules.by_position} == {self._scheduler._mamba_align_size}
        )

    def _largest(self, status: Any, max_new_tokens: int | None) -> int | None:
        local = status.num_locally_computed_tokens
        if local % self._step:
            return 0  # a block that is only partly computed can be neither kept nor loaded
        search = self._search(status)
        cap = load_cap(status, max_new_tokens)
        boundary = search.largest(cap)
        self.attention = search.attention
        self._record(search, boundary, status)
        tail = None
        if self._exact and self._tails is not None:
            best = self._tails.best(status, search, boundary, cap)
            if best is None:
                return None
            tail = best if best > boundary else None
        if tail is None and boundary <= local:
            return 0
        if tail is None and not search.certain(boundary):
            search.insist(boundary)
            return None
        answer = _Answer(_keys(status), local, tail or boundary)
        if search.pending and not self._still_there(answer, tail, status):
            return None
        being_loaded = self._scheduler._chunks_being_loaded
        if being_loaded and not being_loaded.isdisjoint(self._loads(answer, tail, status.req)):
            return None
        if tail is not None:
            self._take_tail(status, tail)
        self._answers[status.req.request_id] = answer
        return answer.boundary - local

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

    def _loads(self, answer: _Answer, tail: int | None, request: Any) -> list[bytes]:
        """Keys that an answer makes vLLM load; in the order of its groups without a tail."""
        if tail is None or self._tails is None:
            return list(self._rules.needed(*answer))
        keys = [key for _, _, key in self._tails.keys(request, tail)]
        for rule in self._rules.full:
            chunks = rule.chunks(answer.local, tail - tail % rule.chunk)
            keys += answer.keys[rule.position][chunks.start : chunks.stop]
        return keys

    def _still_there(self, answer: _Answer, tail: int | None, status: Any) -> bool:
        """Whether chunks found in this attempt outlived it.

        A tiered manager starts to promote a chunk when it is asked for, and may evict
        for it what it has just reported as a hit. Its first tier can be asked without that.
        """
        primary = getattr(self._scheduler.manager, "primary_tier", None)
        return primary is None or all(
            primary.lookup(key, status.req_context) is HIT
            for key in self._loads(answer, tail, status.req)
        )

    def _take_tail(self, status: Any, tail: int) -> None:
        assert self._tails is not None
        status.partial_tail_boundary = tail
        record = self._scheduler._events_tracker.record_partial_lookup
        for group, tokens, key in self._tails.keys(status.req, tail):
            record(status.req, group, tokens, key)

    def _record(self, search: Search, boundary: int, status: Any) -> None:
        """Tell the observer and vLLM's event tracker what was asked and found."""
        scheduler = self._scheduler
        for position, end in search.prefixes():
            # 0.33 keeps it for its own search for a partial tail.
            state = status.group_states[position]
            if hasattr(state, "lookup_hit_end_chunk_idx"):
                state.lookup_hit_end_chunk_idx = end
        tracker, observer = scheduler._events_tracker, scheduler.observer
        describing = getattr(tracker, "self_describing_enabled", True)
        if observer is None and not describing:
            return
        for rule, keys, hits in search.queries(boundary):
            group = scheduler.config.kv_group_configs[rule.position]
            if observer is not None:
                observer.queries.append((keys, hits, group.sliding_window_size_in_chunks))
            if describing and group.sliding_window_size_in_chunks is None:
                start = status.num_locally_computed_tokens // rule.chunk
                for index, key in enumerate(keys[: hits or 0], start):
                    tracker.record_lookup(status.req, group, index, key)

    def _checked_load(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """``prepare_load`` of the manager: it ends the engine over a chunk that is not there."""
        if self._confirmed is not None and not self.fallback.active():
            confirmed = self._confirmed()
            if keys != confirmed and (unconfirmed := set(keys).difference(confirmed)):
                error = UnconfirmedError(
                    f"{len(unconfirmed)} of {len(keys)} chunks to be loaded were not found by the "
                    "lookup that promised them"
                )
                if raise_errors():
                    raise error
                self._fail(error)
        return self._prepare_load(keys, *args, **kwargs)


def apply(base: type[Any], settings: ConnectorSettings) -> type[Any]:
    """Subclass of an ``OffloadingConnectorScheduler`` class with the configured lookups."""
    if settings.lookup is LookupMode.STOCK:
        return base

    class WithBoundaryLookup(base):
        manager: Any

        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, vllm_config, kv_cache_config)
            shape = layout.describe(self, kv_cache_config, vllm_config)
            self.boundary_lookup = BoundaryLookup(self, shape, settings)

        def _lookup(self, req_status: Any, *args: Any, **kwargs: Any) -> int | None:
            answer: int | None
            if self.boundary_lookup.finds_tails():
                req_status.partial_tail_boundary = None
                found = getattr(self, compat.SEARCH)(req_status, *args, **kwargs)
                answer = compat.hit_tokens(found)
                if compat.TELLS_ATTENTION and None not in found:
                    getattr(self, compat.JUNCTION)(req_status, found[1], answer)
            else:
                answer = super()._lookup(req_status, *args, **kwargs)
            return answer

        def _sliding_window_lookup(self, *args: Any, **kwargs: Any) -> int | None:
            # vLLM may ask a windowed group again in a later pass, and so may we.
            manager = self.manager
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

    stock = getattr(base, compat.SEARCH)

    def search(self: Any, req_status: Any, *args: Any, **kwargs: Any) -> Any:
        cap = kwargs.get("max_num_new_tokens", args[0] if args else None)
        lookup: BoundaryLookup = self.boundary_lookup
        lookup.attention = None
        theirs: list[Any] = []

        def ask() -> int | None:
            theirs.append(stock(self, req_status, *args, **kwargs))
            return compat.hit_tokens(theirs[0])

        answer = lookup.answer(req_status, ask, cap)
        if not compat.TELLS_ATTENTION:
            return answer
        return answer, theirs[0][1] if theirs else lookup.attention

    setattr(WithBoundaryLookup, compat.SEARCH, search)
    return WithBoundaryLookup
