"""``KVLensOffloadingConnector``: drop-in for vLLM's ``OffloadingConnector``.

Loaded by configuration alone::

    --kv-transfer-config '{"kv_connector": "KVLensOffloadingConnector",
        "kv_connector_module_path": "kvlens.connector", "kv_role": "kv_both", ...}'

Two depths (``support.py``). At ``groups`` depth vLLM's scheduler side is built as a
class of ours, with hooks and corrections. At ``interface`` depth it is vLLM's own,
and what passes its public methods is recorded. Only public names of vLLM are imported
here; everything that needs others is imported when it is known to be there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as stock

from kvlens.connector import config, describe, logs, managers, plugin, versions, watch
from kvlens.connector import support as supports
from kvlens.connector.observer import Observer, Sink, raise_errors
from kvlens.connector.recording import Recording
from kvlens.connector.symbols import Part
from kvlens.connector.watch import InterfaceObserver
from kvlens.telemetry import environment
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import Correction, EngineInfo
from kvlens.telemetry.semconv import Depth

logger = logging.getLogger(__name__)

# MultiConnector looks up by name whose stats it has, whatever module path was configured.
plugin.register_name()


class KVLensOffloadingConnector(stock.OffloadingConnector):
    """vLLM's connector, corrected and observed."""

    watcher: InterfaceObserver | None = None
    _stats_off = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        logs.join_vllm()
        self._settings = config.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._support = supports.find(self._settings.depth)
        self._info: EngineInfo | None = None
        self._recording: Recording | None = None
        self._managers: list[Any] = []
        building = _Building(self._support, self._settings)
        with building.around(self._managers):
            super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        known = config.ConnectorSettings.__struct_fields__
        for sentence in environment.misspelt(os.environ, known):
            logger.warning("kvlens: %s", sentence)
        self._start(vllm_config, kv_cache_config, building)

    def _start(self, vllm_config: Any, kv_cache_config: Any, building: _Building) -> None:
        """Begin to record, as deep as this vLLM lets us; never at the cost of the engine."""
        if building.depth is Depth.GROUPS:
            try:
                self._watch_groups(vllm_config, kv_cache_config, building)
                return
            except config.ConfigError:
                raise
            except Exception as error:
                if self._support.tested and raise_errors():
                    raise
                building.give_up(error)
        try:
            self._watch_interface(vllm_config, kv_cache_config, building)
        except config.ConfigError:
            raise
        except Exception:
            if self._support.tested and raise_errors():
                raise
            logger.exception("kvlens cannot describe this engine and observes nothing of it")

    def _watch_groups(self, vllm_config: Any, kv_cache_config: Any, building: _Building) -> None:
        from kvlens.connector import groups

        self._info = info = groups.engine(
            vllm_config, kv_cache_config, self.connector_scheduler, building, self._support
        )
        _announce(info)
        if self._settings.telemetry:
            self._recording = Recording(info, self._settings)
            self.observe(self._recording.recorder)

    def _watch_interface(self, vllm_config: Any, kv_cache_config: Any, building: _Building) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._info = info = describe.engine(
            vllm_config,
            kv_cache_config,
            self._support,
            stock.OffloadingConnector.__name__,
            offload_prompt_only=bool(extra.get("offload_prompt_only", True)),
            store_threshold=int(extra.get("store_threshold", 0)),
            corrections=building.planned,
        )
        info.not_seen += building.reasons
        _announce(info)
        if not self._settings.telemetry:
            return
        if self._recording is not None:  # of an attempt at groups depth
            self._recording.close()
        self._recording = Recording(info, self._settings)
        self.observe(self._recording.recorder)

    def observe(self, sink: Sink) -> None:
        """Append facts to ``sink`` from here on, as deep as :attr:`info` says."""
        assert self._info is not None
        if self._info.depth == Depth.GROUPS:
            assert self.connector_scheduler is not None
            self.connector_scheduler.observe(Observer(sink))
            return
        watcher = InterfaceObserver(sink)
        for manager in self._managers:
            managers.watch(manager, watcher)
        self.watcher = watcher
        watch.attach(self, watcher)  # only now: at groups depth no call pays for it

    @property
    def info(self) -> EngineInfo | None:
        """What this engine is; None on workers."""
        return self._info

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this engine; None on workers and without telemetry."""
        return self._recording.recorder if self._recording is not None else None

    def register_kv_caches(self, kv_caches: Any, *args: Any, **kwargs: Any) -> Any:
        """Register the caches, then measure each transfer job of the worker."""
        answer = super().register_kv_caches(kv_caches, *args, **kwargs)
        if self._settings.telemetry:
            self.measure_jobs()
        return answer

    if hasattr(stock.OffloadingConnector, "register_cross_layers_kv_cache"):

        def register_cross_layers_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
            """The same, where vLLM keeps all layers of a block together (0.27, 0.28)."""
            answer = super().register_cross_layers_kv_cache(*args, **kwargs)
            if self._settings.telemetry:
                self.measure_jobs()
            return answer

    def measure_jobs(self) -> None:
        """Note size and time of each transfer of the worker side, where vLLM lets us."""
        if Part.TRANSFERS not in self._support.lost:
            from kvlens.connector import worker

            worker.measure_jobs(self.connector_worker)

    def build_connector_worker_meta(self) -> Any:
        """Completed jobs of this worker, with size and time of each."""
        meta = super().build_connector_worker_meta()
        if Part.TRANSFERS in self._support.lost:
            return meta
        from kvlens.connector import worker

        return worker.with_transfers(self.connector_worker, meta)

    def get_kv_connector_stats(self) -> Any:
        """vLLM's stats of this step, with ours added."""
        stats = super().get_kv_connector_stats()
        if self._recording is None or self._stats_off or Part.METRICS in self._support.lost:
            return stats
        try:
            from kvlens.connector import prom

            return prom.merge(stats, self._recording.stats.take())
        except Exception as error:
            if raise_errors():
                raise
            self._stats_off = True
            self._observer().failed("get_kv_connector_stats", error)
            return stats

    def _observer(self) -> Observer:
        observer: Observer = self.watcher or self.connector_scheduler.observer
        return observer

    def shutdown(self) -> None:
        """Shut down vLLM's part, then drain and send what is left."""
        super().shutdown()
        if self._recording is not None:
            self._recording.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Stats for vLLM's log, which leaves ours out."""
        if not _exports_metrics():
            return super().build_kv_connector_stats(data)
        from kvlens.connector import prom

        return prom.LoggedStats(data=data) if data is not None else prom.LoggedStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        """Metrics on vLLM's own ``/metrics``, ours with all children at 0."""
        if not _exports_metrics():
            return super().build_prom_metrics(*args, **kwargs)
        from kvlens.connector import prom

        return prom.KVLensPromMetrics(*args, **kwargs)


@functools.cache
def _exports_metrics() -> bool:
    """Whether ours can be among vLLM's metrics; asked once, not with each step's stats."""
    return Part.METRICS not in supports.find().lost


class _Building:
    """How vLLM's constructor is made to build a scheduler of ours, if it can."""

    def __init__(self, support: supports.Support, settings: config.ConnectorSettings) -> None:
        self.depth = support.depth
        self.planned: list[Correction] = []
        self.spec: Any = None
        self.reasons: list[str] = []
        """Why it is not the depth that the symbols promised."""
        self._support = support
        self._settings = settings

    def give_up(self, error: Exception) -> None:
        """Go on at ``interface`` depth, and say why."""
        self.depth = Depth.INTERFACE
        self.planned = [
            Correction(name=item.name, state="off", reason="the hooks do not fit this vLLM")
            for item in self.planned
        ]
        reason = f"hooks do not fit this vLLM ({type(error).__name__}: {error})"
        self.reasons.append(reason)
        logger.warning("kvlens: %s; it is observed at interface depth", reason, exc_info=error)

    @contextmanager
    def around(self, kept: list[Any]) -> Iterator[None]:
        """While vLLM's constructor runs: our scheduler class is built, managers are kept."""
        with ExitStack() as stack:
            if Part.MANAGER not in self._support.lost:
                from vllm.v1.kv_offload.factory import OffloadingSpecFactory

                stack.enter_context(managers.captured(OffloadingSpecFactory, kept))
            ours = self._scheduler_class() if self.depth is Depth.GROUPS else None
            if ours is not None:
                stack.enter_context(self._built_as(ours))
            yield

    def _scheduler_class(self) -> type[Any] | None:
        """The class to build; None, and ``interface`` depth, if that cannot be made."""
        try:
            from kvlens.connector import corrections
            from kvlens.connector.scheduler import scheduler_class

            self.planned = corrections.plan(self._settings, self._support)
            return scheduler_class(self.planned, self._settings, self._support)
        except config.ConfigError:
            raise
        except Exception as error:
            if self._support.tested and raise_errors():
                raise
            self.give_up(error)
            return None

    @contextmanager
    def _built_as(self, ours: type[Any]) -> Iterator[None]:
        """vLLM's constructor names its scheduler class directly: replace it while that runs."""
        original = stock.OffloadingConnectorScheduler

        def build(spec: Any, *args: Any, **kwargs: Any) -> Any:
            self.spec = spec
            try:
                return ours(spec, *args, **kwargs)
            except Exception as error:
                if self._support.tested and raise_errors():
                    raise
                self.give_up(error)
                return original(spec, *args, **kwargs)

        stock.OffloadingConnectorScheduler = build
        try:
            yield
        finally:
            stock.OffloadingConnectorScheduler = original


def _announce(info: EngineInfo) -> None:
    logger.info(
        "kvlens %s on vLLM %s (pid %d): depth %s, lookup %s, groups %s, drafter groups %s, "
        "capacity %s",
        info.kvlens_version,
        info.vllm_version,
        os.getpid(),
        info.depth,
        info.lookup,
        [f"{g.kv_group}:{g.group_kind}/{g.tokens_per_chunk}" for g in info.layout.groups],
        [g.kv_group for g in info.layout.groups if g.drafter_used],
        info.capacity_chunks,
    )
    if not info.tested:
        logger.warning(
            "kvlens was not tested with vLLM %s (it was with %s): only what is proved on it is "
            "corrected",
            info.vllm_version,
            versions.RANGE,
        )
    for sentence in info.not_seen:
        logger.warning("kvlens: %s", sentence)
    for item in info.corrections:
        log = logger.warning if item.state == "unknown" else logger.info
        log("kvlens correction %s: %s (%s)", item.name, item.state, item.reason)
