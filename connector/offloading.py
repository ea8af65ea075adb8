"""``KVLensOffloadingConnector``: drop-in for vLLM's ``OffloadingConnector``.

Loaded by configuration alone::

    --kv-transfer-config '{"kv_connector": "KVLensOffloadingConnector",
        "kv_connector_module_path": "kvlens.connector", "kv_role": "kv_both", ...}'
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as stock

import kvlens.telemetry
from kvlens.connector import compat, config, corrections, layout, logs, plugin, prom, worker
from kvlens.connector.observer import Observer, raise_errors
from kvlens.connector.scheduler import scheduler_class
from kvlens.telemetry import environment
from kvlens.telemetry.recorder import Recorder
from kvlens.telemetry.records import Correction, EngineInfo
from kvlens.telemetry.sinks import otlp
from kvlens.telemetry.sinks.flight_recorder import FlightRecorder
from kvlens.telemetry.sinks.otel import SpanSink
from kvlens.telemetry.sinks.otel_metrics import Both, OtelMetrics
from kvlens.telemetry.sinks.prometheus import StatsSink

logger = logging.getLogger(__name__)

# MultiConnector looks up by name whose stats it has, whatever module path was configured.
plugin.register_name()


class KVLensOffloadingConnector(stock.OffloadingConnector):
    """vLLM's connector, corrected and observed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        logs.join_vllm()
        support = compat.require_supported()
        transfer = vllm_config.kv_transfer_config
        self._settings = config.load(transfer.kv_connector_extra_config)
        if not support.tested:
            logger.warning(support.warning)
            self._settings = config.only_observing(self._settings, support.observed)
        self._info: EngineInfo | None = None
        self._recorder: Recorder | None = None
        self._stats: StatsSink | None = None
        self._otel_metrics: OtelMetrics | None = None
        if not support.observed:
            super().__init__(vllm_config, role, kv_cache_config)
            return
        planned = corrections.plan(self._settings)
        spec: list[Any] = []
        with _built_as(scheduler_class(planned, self._settings), spec):
            super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        known = config.ConnectorSettings.__struct_fields__
        for sentence in environment.misspelt(os.environ, known):
            logger.warning("kvlens: %s", sentence)
        try:
            self._start(vllm_config, kv_cache_config, planned, spec[0])
        except Exception:
            if support.tested:
                raise
            logger.exception("kvlens does not know its way about this vLLM and observes nothing")

    def _start(
        self, vllm_config: Any, kv_cache_config: Any, planned: list[Correction], spec: Any
    ) -> None:
        self._info = info = EngineInfo(
            engine_id=str(vllm_config.kv_transfer_config.engine_id),
            incarnation_id=uuid.uuid4().hex,
            model=str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
            started_at=time.time(),
            kvlens_version=kvlens.telemetry.__version__,
            vllm_version=compat.vllm_version(),
            layout=layout.describe(self.connector_scheduler, kv_cache_config, vllm_config),
            lookup=self._settings.lookup.value,
            corrections=planned,
            dp_rank=compat.dp_rank(vllm_config),
            devices=int(vllm_config.parallel_config.world_size),
            host=socket.gethostname(),
            block_drop=compat.drops_last_block(vllm_config)
            and not compat.hash_lookahead(vllm_config),
            widens=corrections.widens(planned),
            load_window=compat.reaches_load_window(),
            capacity_chunks=compat.capacity_chunks(spec),
            offload_prompt_only=bool(getattr(spec, "offload_prompt_only", True)),
            store_threshold=int(spec.extra_config.get("store_threshold", 0)),
            retention_interval=compat.retention_interval(self.connector_scheduler.config),
            persistent_tier=compat.persistent_tier(spec),
            lower_tiers=compat.lower_tiers(self.connector_scheduler),
            hash_seed_fixed=compat.hash_seed_fixed(vllm_config),
        )
        _announce(info)
        if not self._settings.telemetry:
            return
        self._stats = StatsSink(info)
        self._otel_metrics = self._metrics_by_otlp(info)
        spans = SpanSink.from_settings(
            info,
            endpoint=self._settings.otlp_endpoint,
            headers=self._settings.otlp_headers,
            token=self._settings.ingest_token,
            queue_size=self._settings.span_queue_size,
        )
        # After the spans, whose ids a record then carries.
        recording = FlightRecorder.from_settings(
            info,
            folder=self._settings.flight_recorder,
            mode=self._settings.flight_recorder_mode,
            context=self._settings.flight_recorder_context,
            max_bytes=self._settings.flight_recorder_max_bytes,
        )
        self._recorder = Recorder(
            info,
            metrics=Both(self._stats, self._otel_metrics) if self._otel_metrics else self._stats,
            sinks=[sink for sink in (spans, recording) if sink is not None],
            queue_size=self._settings.queue_size,
            sample_rate=self._settings.sample_rate,
        )
        self._recorder.start()
        assert self.connector_scheduler is not None
        self.connector_scheduler.observe(Observer(self._recorder))

    def _metrics_by_otlp(self, info: EngineInfo) -> OtelMetrics | None:
        if not self._settings.otlp_metrics:
            return None
        to = otlp.receiver(self._settings.otlp_endpoint, "metrics")
        if to is None:
            raise config.ConfigError(
                "kvlens connector setting otlp_metrics: there is no receiver to send to; set "
                "otlp_endpoint as well"
            )
        headers = otlp.with_token(self._settings.otlp_headers, self._settings.ingest_token)
        return OtelMetrics(info, otlp.metric_exporter(to, headers), to.endpoint)

    @property
    def info(self) -> EngineInfo | None:
        """What this engine is; None on workers."""
        return self._info

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this engine; None on workers and without telemetry."""
        return self._recorder

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Register the caches, then measure each transfer job of the worker."""
        super().register_kv_caches(kv_caches)
        self._measure_jobs()

    def register_cross_layers_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """The same, where vLLM keeps all layers of a block together (0.27, 0.28)."""
        super().register_cross_layers_kv_cache(*args, **kwargs)
        self._measure_jobs()

    def _measure_jobs(self) -> None:
        if self._settings.telemetry:
            worker.measure_jobs(self.connector_worker)

    def build_connector_worker_meta(self) -> Any:
        """Completed jobs of this worker, with size and time of each."""
        return worker.with_transfers(self.connector_worker, super().build_connector_worker_meta())

    def get_kv_connector_stats(self) -> Any:
        """vLLM's stats of this step, with ours beside them."""
        stats = super().get_kv_connector_stats()
        scheduler = self.connector_scheduler
        if self._stats is None or scheduler is None:
            return stats
        try:
            return prom.merge(stats, self._stats.take())
        except Exception as error:
            if raise_errors():
                raise
            scheduler.observer.failed("get_kv_connector_stats", error)
            return stats

    def shutdown(self) -> None:
        """Shut down vLLM's part, then drain and send what is left."""
        super().shutdown()
        if self._recorder is not None:
            self._recorder.close()
        if self._otel_metrics is not None:
            self._otel_metrics.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Stats for vLLM's log, which leaves ours out."""
        return prom.LoggedStats(data=data) if data is not None else prom.LoggedStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Metrics on vLLM's own ``/metrics``, ours with all children at 0."""
        return prom.KVLensPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@contextmanager
def _built_as(cls: type[Any], spec_out: list[Any]) -> Iterator[None]:
    """Let vLLM's constructor build ``cls`` as its scheduler, and keep the spec.

    vLLM's constructor names its scheduler class directly; replacing the name
    while it runs is the one boundary that needs no copy of that constructor.
    """

    def build(spec: Any, *args: Any, **kwargs: Any) -> Any:
        spec_out.append(spec)
        return cls(spec, *args, **kwargs)

    original = stock.OffloadingConnectorScheduler
    stock.OffloadingConnectorScheduler = build
    try:
        yield
    finally:
        stock.OffloadingConnectorScheduler = original


def _announce(info: EngineInfo) -> None:
    drafters = [g.kv_group for g in info.layout.groups if g.drafter_used]
    logger.info(
        "kvlens %s on vLLM %s (pid %d): lookup %s, groups %s, drafter groups %s, capacity %s",
        info.kvlens_version,
        info.vllm_version,
        os.getpid(),
        info.lookup,
        [f"{g.kv_group}:{g.group_kind}/{g.tokens_per_chunk}" for g in info.layout.groups],
        drafters,
        info.capacity_chunks,
    )
    for item in info.corrections:
        log = logger.warning if item.state == "unknown" else logger.info
        log("kvlens correction %s: %s (%s)", item.name, item.state, item.reason)
