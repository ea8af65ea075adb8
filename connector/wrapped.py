"""The subclasses through which a connector is watched (``wrapping.py`` says when).

Of the real class only construction, stats, metrics and shutdown are overridden; calls of
its instance are watched by :mod:`watch`. An error of ours costs the recording, never
the connector.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvlens.connector import config, describe, inner, logs, managers, own_metrics, watch
from kvlens.connector import support as supports
from kvlens.connector.observer import raise_errors
from kvlens.connector.recording import Recording
from kvlens.connector.symbols import Part
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Depth

logger = logging.getLogger(__name__)

_INNER, _OURS = "inner", "kvlens"
_siblings: ContextVar[dict[str, int] | None] = ContextVar("_siblings_of_watched", default=None)
"""While a ``MultiConnector`` makes its children: how many of each name there are."""


class WrappedStats(KVConnectorStats):
    """The inner connector's stats, which behave as without us, and kvlens' numbers."""

    def __init__(self, inner: Any, ours: list[Any] | None) -> None:
        self.inner = inner
        self.ours = ours

    @property
    def data(self) -> dict[str, Any]:
        """As it travels to the API server."""
        inner = self.inner
        if inner is not None:
            inner = inner.to_dict() if hasattr(inner, "to_dict") else inner.data
        return {_INNER: inner, _OURS: self.ours}

    def to_dict(self) -> dict[str, Any]:
        """The same, under the name that newer releases use."""
        return self.data

    def reset(self) -> None:
        """Forget both."""
        self.ours = None
        if self.inner is not None:
            self.inner.reset()

    def aggregate(self, other: Any) -> WrappedStats:
        """Add another's; the inner ones are added by their own class."""
        theirs = other.inner if isinstance(other, WrappedStats) else other
        if self.inner is None:
            self.inner = theirs
        elif theirs is not None:
            self.inner = self.inner.aggregate(theirs)
        if more := getattr(other, "ours", None):
            self.ours = [*(self.ours or ()), *more]
        return self

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log: the inner's values only; ours are for Prometheus."""
        return self.inner.reduce() if self.inner is not None else {}

    def is_empty(self) -> bool:
        """Whether there is nothing to pass on."""
        return not self.ours and (self.inner is None or bool(self.inner.is_empty()))


class WrappedPromMetrics:
    """The inner connector's metrics, if it has any, and kvlens' own."""

    def __init__(self, inner: Any, own: own_metrics.OwnMetrics | None) -> None:
        self._inner = inner
        self._own = own

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one engine's stats."""
        theirs, ours = _parts(transfer_stats_data)
        if self._inner is not None and theirs is not None:
            self._inner.observe(theirs, engine_idx)
        if self._own is not None and ours:
            self._own.observe(ours, engine_idx)


def _parts(data: dict[str, Any]) -> tuple[Any, Any]:
    """Inner and own part; a sibling that is not watched sends its own data only."""
    if data.keys() == {_INNER, _OURS}:
        return data[_INNER], data[_OURS]
    return data, None


class _Watch:
    """What is kept for one watched connector in the scheduler's process."""

    def __init__(self, info: EngineInfo, settings: config.ConnectorSettings) -> None:
        self.info = info
        self.recording = Recording(info, settings)
        self.observer = watch.InterfaceObserver(self.recording.recorder)
        self._stats_off = False

    def take(self) -> list[Any] | None:
        """Numbers since the last step, as lists that JSON and msgpack know."""
        if self._stats_off:
            return None
        try:
            payload = self.recording.stats.take()
            if payload is None:
                return None
            return [
                [name, list(labels), value]
                for name, series in payload.data.items()
                for labels, value in series.items()
            ]
        except Exception as error:
            if raise_errors():
                raise
            self._stats_off = True
            self.observer.failed("get_kv_connector_stats", error)
            return None

    def close(self) -> None:
        """Drain and send what is left."""
        try:
            self.recording.close()
        except Exception:
            if raise_errors():
                raise
            logger.exception("kvlens could not close its recording")


def watched_class(real: type[Any]) -> type[Any]:
    """A subclass of ``real`` that is watched."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        shown = inner.shown_to_inner(vllm_config)
        with _managers_of(real) as kept:
            real.__init__(self, shown, *args, **kwargs)
        role = args[0] if args else kwargs.get("role")
        if role == KVConnectorRole.SCHEDULER:
            caches = args[1] if len(args) > 1 else kwargs.get("kv_cache_config")
            self._kvlens = _start(self, real.__name__, vllm_config, caches, kept)

    def get_kv_connector_stats(self: Any) -> Any:
        inner = real.get_kv_connector_stats(self)
        ours = self._kvlens.take() if self._kvlens is not None else None
        return None if inner is None and ours is None else WrappedStats(inner, ours)

    def build_kv_connector_stats(cls: Any, data: dict[str, Any] | None = None) -> Any:
        if data is None:
            inner = real.build_kv_connector_stats()
            return None if inner is None else WrappedStats(inner, None)
        theirs, _ = _parts(data)
        if theirs is None:
            return WrappedStats(None, None)
        inner = real.build_kv_connector_stats(theirs)
        return None if inner is None else WrappedStats(inner, None)

    def build_prom_metrics(
        cls: Any, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any
    ) -> Any:
        shown = inner.shown_to_inner(vllm_config)
        theirs = real.build_prom_metrics(shown, metric_types, labelnames, values)
        return WrappedPromMetrics(theirs, _own_metrics(metric_types, labelnames, values))

    def shutdown(self: Any) -> Any:
        try:
            return real.shutdown(self)
        finally:
            if self._kvlens is not None:
                self._kvlens.close()

    return _subclass(
        real,
        _kvlens=None,
        __init__=__init__,
        get_kv_connector_stats=get_kv_connector_stats,
        build_kv_connector_stats=classmethod(build_kv_connector_stats),
        build_prom_metrics=classmethod(build_prom_metrics),
        shutdown=shutdown,
    )


def parent_class(real: type[Any]) -> type[Any]:
    """A subclass of ``MultiConnector`` that is not watched, but tells its children apart."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        token = _siblings.set({})
        try:
            real.__init__(self, inner.shown_to_inner(vllm_config), *args, **kwargs)
        finally:
            _siblings.reset(token)

    return _subclass(real, __init__=__init__)


def _subclass(real: type[Any], **overridden: Any) -> type[Any]:
    same = {"__module__": real.__module__, "__qualname__": real.__qualname__}
    metaclass: Any = type(real)
    return metaclass(real.__name__, (real,), {**overridden, **same, "__doc__": real.__doc__})


@contextmanager
def _managers_of(real: type[Any]) -> Iterator[list[Any]]:
    """Keep the offloading managers that vLLM's own connector makes: they tell evictions."""
    kept: list[Any] = []
    if not any(base.__name__ == "OffloadingConnector" for base in real.__mro__):
        yield kept
        return
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory as factory
    except ImportError:  # the release has it elsewhere: evictions are not seen
        yield kept
        return
    with managers.captured(factory, kept):
        yield kept


def _own_metrics(metric_types: Any, labelnames: Any, values: Any) -> Any:
    try:
        return own_metrics.shared(metric_types, labelnames, values)
    except Exception:
        if raise_errors():
            raise
        logger.exception("kvlens cannot show its metrics; those of the connector are there")
        return None


def _start(
    connector: Any, name: str, vllm_config: Any, kv_cache_config: Any, kept: list[Any]
) -> _Watch | None:
    """Begin to record; None, and a line in the log, if that cannot be."""
    logs.join_vllm()
    settings = config.load(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if not settings.telemetry:
        return None
    watched = None
    try:
        support = supports.find(Depth.INTERFACE)
        info = _describe(name, vllm_config, kv_cache_config, support)
        watched = _Watch(info, settings)
        if Part.MANAGER not in support.lost:
            for manager in kept:
                managers.watch(manager, watched.observer)
        watch.attach(connector, watched.observer)
        logger.info(
            "kvlens %s on vLLM %s watches %s at interface depth (engine %s)",
            info.kvlens_version, info.vllm_version, name, info.engine_id,
        )  # fmt: skip
        return watched
    except config.ConfigError:
        raise
    except Exception:
        if raise_errors():
            raise
        logger.exception("kvlens cannot watch %s; it runs as without kvlens", name)
        if watched is not None:
            watched.close()
        return None


def _describe(
    name: str, vllm_config: Any, kv_cache_config: Any, support: supports.Support
) -> EngineInfo:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    info = describe.engine(
        vllm_config,
        kv_cache_config,
        # Nothing private is used, so none of it is missed.
        replace(support, found=[]),
        name,
        offload_prompt_only=bool(extra.get("offload_prompt_only", True)),
        store_threshold=int(extra.get("store_threshold", 0)),
    )
    siblings = _siblings.get()
    if siblings is not None:
        siblings[name] = number = siblings.get(name, 0) + 1
        info.engine_id += f"/{name}" if number == 1 else f"/{name}-{number}"
    return info
