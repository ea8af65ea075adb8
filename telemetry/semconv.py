"""Every metric, label, span, attribute, unit and bucket that kvlens publishes.

No other module spells one of these names. Metrics follow Prometheus' naming
(base units, ``_total`` for counters, no colon, so that a name is the same in
the text and the OpenMetrics exposition); spans and attributes follow
OpenTelemetry's (``kvlens.*``, lower case, dots between name spaces).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvlens.telemetry.vocabulary import DEFERRED_EXITS as DEFERRED_EXITS
from kvlens.telemetry.vocabulary import QUIET_VERDICTS as QUIET_VERDICTS
from kvlens.telemetry.vocabulary import Cause as Cause
from kvlens.telemetry.vocabulary import Confidence as Confidence
from kvlens.telemetry.vocabulary import Depth as Depth
from kvlens.telemetry.vocabulary import Exit as Exit
from kvlens.telemetry.vocabulary import Fallback as Fallback
from kvlens.telemetry.vocabulary import GroupKind as GroupKind
from kvlens.telemetry.vocabulary import Identity as Identity
from kvlens.telemetry.vocabulary import IncidentKind as IncidentKind
from kvlens.telemetry.vocabulary import Severity as Severity
from kvlens.telemetry.vocabulary import Source as Source
from kvlens.telemetry.vocabulary import Tier as Tier
from kvlens.telemetry.vocabulary import Verdict as Verdict
from kvlens.telemetry.vocabulary import Word as Word

SCHEMA_VERSION: Final = 1
"""Version of the JSON in :data:`ATTR_RECORD` and :data:`ATTR_ENGINE`."""


# --- labels -----------------------------------------------------------------
LABEL_MODEL: Final = "model_name"
LABEL_ENGINE: Final = "engine"
LABEL_GROUP: Final = "kv_group"
LABEL_KIND: Final = "group_kind"
LABEL_EXIT: Final = "exit"
LABEL_VERDICT: Final = "verdict"
LABEL_CAUSE: Final = "cause"
LABEL_DIRECTION: Final = "direction"
LABEL_REASON: Final = "reason"
LABEL_SOURCE: Final = "source"
LABEL_TIER: Final = "tier"
LABEL_IDENTITY: Final = "identity"
LABEL_CAPACITY: Final = "capacity"
GROUP_LABELS: Final = (LABEL_GROUP, LABEL_KIND)
EXEMPLAR_TRACE: Final = "trace_id"
"""Label of exemplars, as Grafana looks for it."""

DIRECTION_STORE: Final = "store"
DIRECTION_LOAD: Final = "load"

# --- metrics ----------------------------------------------------------------
MetricType = Literal["counter", "gauge", "histogram"]

CHUNK_BUCKETS: Final = (0.0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
LOOKUP_BUCKETS: Final = (
    1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1,
)  # fmt: skip
TRANSFER_BUCKETS: Final = (
    1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip
DISTANCE_BUCKETS: Final = (16.0, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304)
RATIO_BUCKETS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7, 15)
CAPACITY_MULTIPLES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Capacities, in multiples of the engine's own, for which the hit ratio is estimated."""
DEFERRAL_BUCKETS: Final = (1e-3, 1e-2, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class Metric:
    """One published metric.

    ``labels`` come after vLLM's own ``model_name`` and ``engine``. ``values``
    gives, per label, the closed set of values whose children are created at 0;
    an empty tuple means that they are known only once the engine reports its
    KV-cache groups.
    """

    name: str
    type: MetricType
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] | None = None
    exemplars: bool = False
    """Whether samples carry the trace id of their request, where the exposition allows."""

    @property
    def exposed_name(self) -> str:
        """Name in the exposition: counters get ``_total`` from the client."""
        return f"{self.name}_total" if self.type == "counter" else self.name

    @property
    def otel_name(self) -> str:
        """Name over OTLP, where the unit is a field of its own: ``kvlens.reload_latency``."""
        name = self.name.replace("_", ".", 1)
        return name.removesuffix("_seconds") if self.type == "histogram" else name


def _group(name: str, type_: MetricType, help_: str, unit: str) -> Metric:
    buckets = CHUNK_BUCKETS if type_ == "histogram" else None
    return Metric(name, type_, help_, unit, GROUP_LABELS, (), buckets)


def _closed(enum: type[Word]) -> tuple[str, ...]:
    return tuple(str(member) for member in enum)


LOOKUPS: Final = Metric(
    "kvlens_lookups", "counter", "Offload lookups by how they ended.", "{lookup}",
    (LABEL_EXIT,), (_closed(Exit),),
)  # fmt: skip
REQUESTS: Final = Metric(
    "kvlens_requests", "counter", "Finished requests by verdict.", "{request}",
    (LABEL_VERDICT,), (_closed(Verdict),),
)  # fmt: skip
POPS: Final = _group(
    "kvlens_pops", "counter", "Volatile trailing chunks popped from drafter groups.", "{chunk}"
)
STORED_CHUNKS: Final = _group(
    "kvlens_stored_chunks", "counter", "Chunks whose store to the offload tier completed.",
    "{chunk}",
)  # fmt: skip
SERVED_CHUNKS: Final = _group(
    "kvlens_served_chunks", "counter", "Chunks loaded back for admitted requests.", "{chunk}"
)
HELD_BACK_CHUNKS: Final = _group(
    "kvlens_held_back_chunks", "counter",
    "Complete chunks that were never offered to the offload tier when their request finished.",
    "{chunk}",
)  # fmt: skip
REFUSED_CHUNKS: Final = _group(
    "kvlens_refused_chunks", "counter", "Chunks that the offload tier refused to store.",
    "{chunk}",
)  # fmt: skip
EVICTED_CHUNKS: Final = _group(
    "kvlens_evicted_chunks", "counter", "Chunks evicted from the offload tier to make room.",
    "{chunk}",
)  # fmt: skip
RESET_CHUNKS: Final = _group(
    "kvlens_reset_chunks", "counter", "Resident chunks given up when the tier was emptied.",
    "{chunk}",
)  # fmt: skip
EXPECTED_TOKENS: Final = Metric(
    "kvlens_expected_tokens", "counter",
    "Tokens that offloading should have served had every computed chunk been stored and kept.",
    "{token}",
)  # fmt: skip
SERVABLE_TOKENS: Final = Metric(
    "kvlens_servable_tokens", "counter",
    "Tokens that were resident and servable at the lookup.", "{token}",
)  # fmt: skip
SERVED_TOKENS: Final = Metric(
    "kvlens_served_tokens", "counter", "Tokens loaded from the offload tier.", "{token}"
)
LOST_TOKENS: Final = Metric(
    "kvlens_lost_tokens", "counter", "Tokens recomputed that should have been served, by cause.",
    "{token}", (LABEL_CAUSE,), (_closed(Cause),),
)  # fmt: skip
PROMPT_TOKENS: Final = Metric(
    "kvlens_prompt_tokens", "counter",
    "Prompt tokens of requests that ran, by where their KV data came from.", "{token}",
    (LABEL_SOURCE,), (_closed(Source),),
)  # fmt: skip
TIER_TOKENS: Final = Metric(
    "kvlens_tier_tokens", "counter", "Tokens loaded, by the tier they came from.", "{token}",
    (LABEL_TIER,), (_closed(Tier),),
)  # fmt: skip
EVICTED_TOKENS: Final = Metric(
    "kvlens_evicted_tokens", "counter",
    "Tokens computed again because capacity had evicted their chunks.", "{token}",
)  # fmt: skip
LOST_GPU_SECONDS: Final = Metric(
    "kvlens_lost_gpu_seconds", "counter",
    "Device time spent on computing again what could have been loaded, by cause.", "s",
    (LABEL_CAUSE,), (_closed(Cause),),
)  # fmt: skip
PREFILL_RATE: Final = Metric(
    "kvlens_prefill_tokens_per_second", "gauge",
    "Prompt tokens that this engine computes per second of a prefill step.", "{token}/s",
)  # fmt: skip
GHOST_CHUNKS: Final = _group(
    "kvlens_ghost_chunks", "counter", "Chunks stored again after the tier had evicted them.",
    "{chunk}",
)  # fmt: skip
GHOST_DISTANCE: Final = Metric(
    "kvlens_ghost_distance_ratio", "histogram",
    "Chunks evicted between a chunk's eviction and its return, in multiples of the capacity.",
    "1", (), (), RATIO_BUCKETS,
)  # fmt: skip
REUSE_DISTANCE: Final = Metric(
    "kvlens_reuse_distance_chunks", "histogram",
    "Distinct chunks used between two uses of the same one; a uniform sample of chunks.",
    "{chunk}", (), (), DISTANCE_BUCKETS,
)  # fmt: skip
HIT_RATIO: Final = Metric(
    "kvlens_hit_ratio", "gauge",
    "Estimated share of chunk uses that a tier of this many times the capacity would serve.",
    "1", (LABEL_CAPACITY,), (tuple(f"{multiple:g}" for multiple in CAPACITY_MULTIPLES),),
)  # fmt: skip
IDENTITY_VIOLATIONS: Final = Metric(
    "kvlens_identity_violations", "counter",
    "Numbers of kvlens that should add up and do not.", "{violation}",
    (LABEL_IDENTITY,), (_closed(Identity),),
)  # fmt: skip
VETOES: Final = _group(
    "kvlens_vetoes", "counter", "Lookups that this group brought to zero.", "{lookup}"
)
OBSERVER_ERRORS: Final = Metric(
    "kvlens_observer_errors", "counter",
    "Errors inside kvlens that were contained; serving was not affected.", "{error}",
)  # fmt: skip
DROPPED_FACTS: Final = Metric(
    "kvlens_dropped_facts", "counter", "Facts dropped because the queue was full.", "{fact}"
)
DROPPED_SPANS: Final = Metric(
    "kvlens_dropped_spans", "counter",
    "Spans dropped because the OTLP endpoint did not take them in time.", "{span}",
)  # fmt: skip
DROPPED_RECORDS: Final = Metric(
    "kvlens_dropped_records", "counter",
    "Request records that the flight recorder could not write in time.", "{record}",
)  # fmt: skip
LOOKUP_WIDTH: Final = _group(
    "kvlens_lookup_width_chunks", "histogram", "Chunks queried of a group in one lookup.",
    "{chunk}",
)  # fmt: skip
LOOKUP_HITS: Final = _group(
    "kvlens_lookup_hit_chunks", "histogram", "Chunks found before the pop in one lookup.",
    "{chunk}",
)  # fmt: skip
LOOKUP_SECONDS: Final = Metric(
    "kvlens_lookup_seconds", "histogram", "Time of one offload lookup on the scheduler thread.",
    "s", (), (), LOOKUP_BUCKETS, True,
)  # fmt: skip
RELOAD_LATENCY: Final = Metric(
    "kvlens_reload_latency_seconds", "histogram",
    "From allocation until the scheduler saw the load finished; without synchronous loads, which "
    "are part of a step.", "s", (), (), TRANSFER_BUCKETS, True,
)  # fmt: skip
TRANSFER_SECONDS: Final = Metric(
    "kvlens_transfer_seconds", "histogram", "Device transfer time of one job.", "s",
    (LABEL_DIRECTION,), ((DIRECTION_STORE, DIRECTION_LOAD),), TRANSFER_BUCKETS, True,
)  # fmt: skip
DEFERRAL_SECONDS: Final = Metric(
    "kvlens_deferral_seconds", "histogram",
    "From a request's first deferred lookup until one was answered or the request ended.",
    "s", (), (), DEFERRAL_BUCKETS, True,
)  # fmt: skip
RESIDENT_CHUNKS: Final = _group(
    "kvlens_resident_chunks", "gauge", "Chunks resident in the offload tier.", "{chunk}"
)
CAPACITY_CHUNKS: Final = Metric(
    "kvlens_capacity_chunks", "gauge", "Chunks that the offload tier can hold.", "{chunk}"
)
DEFERRED_REQUESTS: Final = Metric(
    "kvlens_deferred_requests", "gauge", "Requests whose lookup is deferred now.", "{request}"
)
LOOKUP_FALLBACK: Final = Metric(
    "kvlens_lookup_fallback", "gauge",
    "1 while vLLM's own lookup is used instead of the configured one.", "1",
    (LABEL_REASON,), (_closed(Fallback),),
)  # fmt: skip
TESTED: Final = "tested"
UNTESTED: Final = "untested"
"""Values of the label ``support`` of :data:`INFO`."""
INFO: Final = Metric(
    "kvlens_info", "gauge", "Versions and configuration of this engine's connector.", "1",
    (
        "version", "vllm_version", "lookup", "corrections", "layout", "drafter_groups",
        "persistent_tier", "hash_seed", "depth", "support", "connector",
    ),
)  # fmt: skip
GROUP_INFO: Final = Metric(
    "kvlens_group_info", "gauge", "KV-cache groups of this engine.", "1", GROUP_LABELS
)

METRICS: Final[tuple[Metric, ...]] = (
    LOOKUPS, REQUESTS, POPS, STORED_CHUNKS, SERVED_CHUNKS, HELD_BACK_CHUNKS, REFUSED_CHUNKS,
    EVICTED_CHUNKS, RESET_CHUNKS, EXPECTED_TOKENS, SERVABLE_TOKENS, SERVED_TOKENS, LOST_TOKENS,
    PROMPT_TOKENS, TIER_TOKENS, EVICTED_TOKENS, LOST_GPU_SECONDS, PREFILL_RATE, GHOST_CHUNKS,
    GHOST_DISTANCE, REUSE_DISTANCE, HIT_RATIO, IDENTITY_VIOLATIONS, VETOES, OBSERVER_ERRORS,
    DROPPED_FACTS, DROPPED_SPANS, DROPPED_RECORDS, LOOKUP_WIDTH, LOOKUP_HITS, LOOKUP_SECONDS,
    RELOAD_LATENCY, TRANSFER_SECONDS, DEFERRAL_SECONDS, RESIDENT_CHUNKS, CAPACITY_CHUNKS,
    DEFERRED_REQUESTS, LOOKUP_FALLBACK, INFO, GROUP_INFO,
)  # fmt: skip
METRICS_BY_NAME: Final = {metric.name: metric for metric in METRICS}

# --- spans ------------------------------------------------------------------
SCOPE_NAME: Final = "kvlens"
SERVICE_NAME: Final = "kvlens"

SPAN_ENGINE: Final = "kv_offload.engine"
"""Sent once when an engine's connector starts and once when it stops."""
SPAN_REQUEST: Final = "kv_offload.request"
SPAN_LOOKUP: Final = "kv_offload.lookup"
SPAN_LOAD: Final = "kv_offload.load"
SPAN_STORE: Final = "kv_offload.store"
SPAN_DEFERRAL: Final = "kv_offload.deferral"

# Resource attributes
ATTR_ENGINE: Final = "kvlens.engine"
"""EngineInfo as JSON (see ``records.EngineInfo``)."""
ATTR_SERVICE_NAME: Final = "service.name"
ATTR_SERVICE_VERSION: Final = "service.version"
ATTR_SERVICE_INSTANCE: Final = "service.instance.id"

ATTR_ENGINE_ID: Final = "kvlens.engine.id"
ATTR_DP_RANK: Final = "kvlens.engine.dp_rank"

# Span attributes
ATTR_RECORD: Final = "kvlens.record"
"""RequestRecord as compact JSON, at most :data:`RECORD_MAX_BYTES`."""
ATTR_ENGINE_STATE: Final = "kvlens.engine.state"
ENGINE_STARTED: Final = "started"
ENGINE_ALIVE: Final = "alive"
ENGINE_STOPPED: Final = "stopped"
ATTR_GEN_AI_REQUEST_ID: Final = "gen_ai.request.id"
ATTR_GEN_AI_MODEL: Final = "gen_ai.request.model"
ATTR_VERDICT: Final = "kvlens.verdict"
ATTR_CAUSE: Final = "kvlens.cause"
ATTR_CONFIDENCE: Final = "kvlens.confidence"
ATTR_EXIT: Final = "kvlens.lookup.exit"
ATTR_PROMPT_TOKENS: Final = "kvlens.tokens.prompt"
ATTR_LOCAL_TOKENS: Final = "kvlens.tokens.local"
ATTR_SERVED_TOKENS: Final = "kvlens.tokens.served"
ATTR_SERVABLE_TOKENS: Final = "kvlens.tokens.servable"
ATTR_EXPECTED_TOKENS: Final = "kvlens.tokens.expected"
ATTR_LOST_TOKENS: Final = "kvlens.tokens.lost"
ATTR_OTHER_TOKENS: Final = "kvlens.tokens.other_connector"
ATTR_COMPUTED_TOKENS: Final = "kvlens.tokens.computed"
ATTR_EVICTED_TOKENS: Final = "kvlens.tokens.evicted"
ATTR_LOST_GPU_SECONDS: Final = "kvlens.lost_gpu_seconds"
ATTR_VETOING_GROUP: Final = "kvlens.vetoing_group"
ATTR_GROUPS: Final = "kvlens.groups"
ATTR_GROUP_WIDTHS: Final = "kvlens.groups.width"
ATTR_GROUP_HITS: Final = "kvlens.groups.raw_hits"
ATTR_GROUP_POPS: Final = "kvlens.groups.popped"
ATTR_GROUP_CHUNKS: Final = "kvlens.groups.chunks"
ATTR_ATTEMPT: Final = "kvlens.lookup.attempt"
ATTR_COUNT: Final = "kvlens.lookup.count"
ATTR_JOB_ID: Final = "kvlens.job.id"
ATTR_BYTES: Final = "kvlens.job.bytes"
ATTR_JOB_FAILED: Final = "kvlens.job.failed"
ATTR_RELOAD_LATENCY: Final = "kvlens.load.latency"
ATTR_DEFERRED_FOR: Final = "kvlens.deferral.seconds"

RECORD_MAX_BYTES: Final = 32 * 1024
RESIDENT_RANGES_MAX: Final = 64

# --- the dashboard's own metrics ----------------------------------------------
DASHBOARD_RECORDS: Final = "kvlens_dashboard_records"
DASHBOARD_DUPLICATES: Final = "kvlens_dashboard_duplicate_records"
DASHBOARD_DELETED: Final = "kvlens_dashboard_deleted_records"
DASHBOARD_STORE_BYTES: Final = "kvlens_dashboard_store_bytes"
DASHBOARD_REJECTED: Final = "kvlens_dashboard_rejected_spans"
DASHBOARD_IGNORED: Final = "kvlens_dashboard_ignored_spans"
DASHBOARD_BACKPRESSURE: Final = "kvlens_dashboard_backpressure"
DASHBOARD_OPEN_INCIDENTS: Final = "kvlens_dashboard_open_incidents"
DASHBOARD_STREAM_CLIENTS: Final = "kvlens_dashboard_stream_clients"
DASHBOARD_QUEUE: Final = "kvlens_dashboard_queued_batches"
DASHBOARD_INGEST_SECONDS: Final = "kvlens_dashboard_ingest_seconds"
DASHBOARD_ERRORS: Final = "kvlens_dashboard_errors"
DASHBOARD_METRIC_EXPORTS: Final = "kvlens_dashboard_metric_exports"
DASHBOARD_STREAM_DROPPED: Final = "kvlens_dashboard_stream_dropped_events"
DASHBOARD_NOTIFICATIONS: Final = "kvlens_dashboard_notifications"
DASHBOARD_NOTIFY_WAITING: Final = "kvlens_dashboard_notifications_waiting"
DASHBOARD_SCRAPES: Final = "kvlens_dashboard_scrapes"
DASHBOARD_SCRAPE_TARGETS: Final = "kvlens_dashboard_scrape_targets"
LABEL_STATE: Final = "state"
LABEL_TARGET: Final = "target"
LABEL_OUTCOME: Final = "outcome"

# --- labels of alerts that the dashboard sends, besides engine, model and cause --
LABEL_ALERT: Final = "alertname"
LABEL_SEVERITY: Final = "severity"
LABEL_INCIDENT_KIND: Final = "incident_kind"
LABEL_INCIDENT: Final = "incident"
