"""Offloading managers, through the public methods of their base class.

What a manager takes, refuses, evicts and completes is noted when vLLM calls it; it is
never called by us. The primary tier of a tiered manager is where chunks that can be
loaded live, so its methods are wrapped, and the aliases under which the tiered manager
itself writes to it. From 0.33 on every call is made with the manager's lock held, so
facts keep the order in which they came true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvlens.connector.observer import Observer


def watch(manager: Any, observer: Observer) -> None:
    """Tell ``observer`` what becomes of chunks."""
    primary = getattr(manager, "primary_tier", manager)
    prepare = primary.prepare_store
    primary.prepare_store = _offers(prepare, observer.offered)
    primary.complete_store = complete = _completes(primary.complete_store, observer)
    if hasattr(primary, "prepare_write"):
        primary.prepare_write, primary.complete_write = (
            _offers(prepare, observer.promoted),
            complete,
        )
    complete_load, reset_cache = primary.complete_load, primary.reset_cache

    def loaded(keys: Any, *args: Any, **kwargs: Any) -> Any:
        answer = complete_load(keys, *args, **kwargs)
        observer.loaded(keys)
        return answer

    def reset(*args: Any, **kwargs: Any) -> Any:
        answer = reset_cache(*args, **kwargs)
        observer.reset()
        return answer

    primary.complete_load, primary.reset_cache = loaded, reset


def _offers(prepare: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def offer(keys: Any, *args: Any, **kwargs: Any) -> Any:
        output = prepare(keys, *args, **kwargs)
        note(keys, args[0] if args else kwargs.get("req_context"), output)
        return output

    return offer


def _completes(complete: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    def completed(keys: Any, *args: Any, **kwargs: Any) -> Any:
        answer = complete(keys, *args, **kwargs)
        success = args[1] if len(args) > 1 else kwargs.get("success", True)
        observer.stored(keys, bool(success))
        return answer

    return completed


@contextmanager
def captured(factory: Any, managers: list[Any]) -> Iterator[None]:
    """Keep every manager that a spec from ``factory.create_spec`` makes meanwhile."""
    create = factory.create_spec

    def create_spec(*args: Any, **kwargs: Any) -> Any:
        spec = create(*args, **kwargs)
        get_manager = spec.get_manager

        def keep(*args: Any, **kwargs: Any) -> Any:
            manager = get_manager(*args, **kwargs)
            managers.append(manager)
            return manager

        spec.get_manager = keep
        return spec

    factory.create_spec = create_spec
    try:
        yield
    finally:
        factory.create_spec = create
