"""The scheduler-side class: vLLM's own, the corrections, and hooks around both.

The class is put together at start, innermost first::

    OffloadingConnectorScheduler   vLLM
    QueryHooks                     sees each group query as it is really asked
    corrections                    only those that this vLLM needs
    boundary lookup                the configured search, unless that is vLLM's own
    RequestHooks                   sees each call as vLLM's scheduler makes it

With telemetry off the class has no hooks.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvlens.connector import corrections, exact_lookup, managers
from kvlens.connector.config import ConnectorSettings, LookupMode
from kvlens.connector.observer import Observer
from kvlens.connector.support import Support
from kvlens.connector.symbols import Part
from kvlens.telemetry.records import Correction


class QueryHooks(OffloadingConnectorScheduler):
    """Notes what each group was asked and how many chunks were found."""

    observer: Observer | None = None
    prefix_scans: list[tuple[Any, int | None]] | None = None
    """Keys and hits of full-attention queries, for a search that goes on from there."""

    def _maximal_prefix_lookup(self, *args: Any, **kwargs: Any) -> int | None:
        hits: int | None = super()._maximal_prefix_lookup(*args, **kwargs)
        if self.observer is not None:
            self.observer.asked(args, kwargs, hits)
        if self.prefix_scans is not None:
            self.prefix_scans.append((args[0] if args else kwargs["keys"], hits))
        return hits

    def _sliding_window_lookup(self, *args: Any, **kwargs: Any) -> int | None:
        hits: int | None = super()._sliding_window_lookup(*args, **kwargs)
        if self.observer is not None:
            self.observer.asked_window(args, kwargs, hits)
        return hits


def _request_hooks(base: type[Any]) -> type[Any]:
    class RequestHooks(base):
        """Notes lookups, admissions, stores, loads and ends of requests."""

        def observe(self, observer: Observer) -> None:
            """Start observing: from here on facts are appended."""
            managers.watch(self.manager, observer)
            self.observer = observer
            lookup: exact_lookup.BoundaryLookup | None = getattr(self, "boundary_lookup", None)
            if lookup is not None:
                lookup.fallback.notify = observer.fell_back

        def on_new_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            super().on_new_request(request, *args, **kwargs)
            if self.observer is not None:
                self.observer.added(request, self.observer.status(self, request))

        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any
        ) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool]
            observer: Observer | None = self.observer
            if observer is None:
                answer = super().get_num_new_matched_tokens(
                    request, num_computed_tokens, *args, **kwargs
                )
                return answer
            status = observer.status(self, request)
            if getattr(request, "resumable", False):
                observer.keep_keys(status)
            in_transfer = bool(getattr(status, "transfer_jobs", None))
            observer.queries = []
            start = monotonic_ns()
            answer = super().get_num_new_matched_tokens(
                request, num_computed_tokens, *args, **kwargs
            )
            max_new = kwargs.get("max_num_new_tokens", args[0] if args else None)
            observer.looked_up(
                start,
                request,
                status,
                num_computed_tokens,
                answer[0],
                in_transfer,
                max_new,
            )
            return answer

        def update_state_after_alloc(
            self, request: Any, blocks: Any, num_external_tokens: int, *args: Any, **kwargs: Any
        ) -> None:
            super().update_state_after_alloc(request, blocks, num_external_tokens, *args, **kwargs)
            if self.observer is not None:
                self.observer.admitted(request, num_external_tokens, self)

        def build_connector_meta(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            meta = super().build_connector_meta(scheduler_output, *args, **kwargs)
            if self.observer is not None:
                self.observer.scheduled(meta, scheduler_output, self)
            return meta

        def update_connector_output(self, connector_output: Any, *args: Any, **kwargs: Any) -> None:
            if self.observer is not None:
                self.observer.stepped()
                self.observer.transferred(connector_output)
            super().update_connector_output(connector_output, *args, **kwargs)

        def request_finished(
            self, request: Any, *args: Any, **kwargs: Any
        ) -> tuple[bool, dict[str, Any] | None]:
            status = self.observer.status(self, request) if self.observer is not None else None
            answer: tuple[bool, dict[str, Any] | None] = super().request_finished(
                request, *args, **kwargs
            )
            if self.observer is not None and status is not None:
                self.observer.finished(request, status)
            return answer

        if hasattr(base, "get_external_cache_hit_sources"):

            def get_external_cache_hit_sources(
                self, request: Any, *args: Any, **kwargs: Any
            ) -> Any:
                tokens = super().get_external_cache_hit_sources(request, *args, **kwargs)
                if self.observer is not None:
                    self.observer.tiers(request, tokens)
                return tokens

    return RequestHooks


def scheduler_class(
    planned: list[Correction],
    settings: ConnectorSettings | None = None,
    support: Support | None = None,
) -> type[Any]:
    """The scheduler class for this engine: active corrections and the configured lookup.

    Where ``support`` says that vLLM lacks what lookups of ours need, vLLM's own answers.

    With telemetry off it has no hooks, since even hooks that have nothing to tell
    would cost a microsecond per lookup; an instance takes them on if it is
    observed all the same.
    """
    settings = settings or ConnectorSettings()
    if support is not None and Part.LOOKUP in support.lost:
        settings = msgspec.structs.replace(settings, lookup=LookupMode.STOCK)

    def configured(innermost: type[Any]) -> type[Any]:
        return exact_lookup.apply(corrections.apply(innermost, planned), settings)

    mode = settings.lookup.value
    observed = _request_hooks(configured(QueryHooks))
    observed.lookup_mode = mode
    if settings.telemetry:
        return observed
    # A search of kvlens' own goes on from what the query hooks note.
    stock = settings.lookup is LookupMode.STOCK
    bare = configured(OffloadingConnectorScheduler if stock else QueryHooks)

    class Unobserved(bare):  # type: ignore[misc,valid-type]
        """Corrections and lookup, without hooks."""

        observer: Observer | None = None
        lookup_mode: str = mode

        def observe(self, observer: Observer) -> None:
            """Take on the hooks: from here on facts are appended."""
            self.__class__ = observed
            self.observe(observer)

    return Unobserved
