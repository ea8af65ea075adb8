"""What each metric, span and attribute answers: the source of docs/metrics.md and docs/spans.md.

Names come from :mod:`semconv`. A test fails when something declared there is not
explained here, or when the documents have drifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlens.telemetry import semconv as s


@dataclass(frozen=True)
class Answer:
    """The question that a metric answers, and how to ask it."""

    question: str
    query: str
    """PromQL."""


def _share(part: s.Metric, whole: s.Metric) -> str:
    return (
        f"sum by (engine) (rate({part.exposed_name}[1h])) / "
        f"sum by (engine) (rate({whole.exposed_name}[1h]))"
    )


def _by_group(metric: s.Metric) -> str:
    return f"sum by (kv_group, group_kind) (rate({metric.exposed_name}[5m]))"


def _quantile(metric: s.Metric, quantile: float = 0.95, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, sum by ({by}) (rate({metric.name}_bucket[5m])))"


ANSWERS: Final[dict[s.Metric, Answer]] = {
    s.LOOKUPS: Answer(
        "How do lookups end? `vetoed` and `popped_out` are where hits die.",
        f"sum by (exit) (rate({s.LOOKUPS.exposed_name}[5m]))",
    ),
    s.REQUESTS: Answer(
        "What became of requests?",
        f"sum by (verdict) (increase({s.REQUESTS.exposed_name}[1h]))",
    ),
    s.POPS: Answer("Which groups give up their volatile last chunk?", _by_group(s.POPS)),
    s.STORED_CHUNKS: Answer("How fast is the tier filled, by group?", _by_group(s.STORED_CHUNKS)),
    s.SERVED_CHUNKS: Answer(
        "Is anything ever read back?", _share(s.SERVED_CHUNKS, s.STORED_CHUNKS)
    ),
    s.HELD_BACK_CHUNKS: Answer(
        "Are complete chunks left behind when requests finish (correction `held_back_tail`)?",
        _by_group(s.HELD_BACK_CHUNKS),
    ),
    s.REFUSED_CHUNKS: Answer(
        "Does the tier refuse stores, since all its slots are in use?", _by_group(s.REFUSED_CHUNKS)
    ),
    s.EVICTED_CHUNKS: Answer(
        "How long does the tier hold a chunk (seconds, if it is full)?",
        f"sum({s.RESIDENT_CHUNKS.name}) / sum(rate({s.EVICTED_CHUNKS.exposed_name}[1h]))",
    ),
    s.RESET_CHUNKS: Answer(
        "Was the tier emptied (`reset_cache`)?",
        f"sum(increase({s.RESET_CHUNKS.exposed_name}[1h]))",
    ),
    s.EXPECTED_TOKENS: Answer(
        "What share of the tokens that it should serve does offloading serve?",
        _share(s.SERVED_TOKENS, s.EXPECTED_TOKENS),
    ),
    s.SERVABLE_TOKENS: Answer(
        "What share of what is there is served? Below 1 the lookup is at fault.",
        _share(s.SERVED_TOKENS, s.SERVABLE_TOKENS),
    ),
    s.SERVED_TOKENS: Answer(
        "How many tokens per second need not be computed?",
        f"sum by (engine) (rate({s.SERVED_TOKENS.exposed_name}[5m]))",
    ),
    s.LOST_TOKENS: Answer(
        "What is lost, and why?",
        f"topk(3, sum by (cause) (increase({s.LOST_TOKENS.exposed_name}[1h])))",
    ),
    s.PROMPT_TOKENS: Answer(
        "Where do prompt tokens come from?",
        f"sum by (source) (rate({s.PROMPT_TOKENS.exposed_name}[5m])) / ignoring(source) "
        f"group_left sum(rate({s.PROMPT_TOKENS.exposed_name}[5m]))",
    ),
    s.TIER_TOKENS: Answer(
        "Which tier serves? vLLM tells from 0.32 on, and only with log stats.",
        f"sum by (tier) (rate({s.TIER_TOKENS.exposed_name}[5m]))",
    ),
    s.EVICTED_TOKENS: Answer(
        "How much is computed again because the pool is too small?",
        f"sum by (engine) (rate({s.EVICTED_TOKENS.exposed_name}[5m]))",
    ),
    s.LOST_GPU_SECONDS: Answer(
        "What do losses cost, in devices kept busy?",
        f"sum by (cause) (rate({s.LOST_GPU_SECONDS.exposed_name}[1h]))",
    ),
    s.PREFILL_RATE: Answer(
        "How fast does an engine compute prompts?", f"min by (engine) ({s.PREFILL_RATE.name})"
    ),
    s.GHOST_CHUNKS: Answer(
        "What share of stores brings back what had been evicted?",
        _share(s.GHOST_CHUNKS, s.STORED_CHUNKS),
    ),
    s.GHOST_DISTANCE: Answer(
        "How many pools more would have kept 9 of 10 evicted chunks until they came back?",
        _quantile(s.GHOST_DISTANCE, 0.9),
    ),
    s.REUSE_DISTANCE: Answer(
        "How many chunks lie between two uses, typically?", _quantile(s.REUSE_DISTANCE, 0.5)
    ),
    s.HIT_RATIO: Answer(
        "What would a pool twice as large gain?",
        f'max({s.HIT_RATIO.name}{{capacity="2"}}) - max({s.HIT_RATIO.name}{{capacity="1"}})',
    ),
    s.IDENTITY_VIOLATIONS: Answer(
        "Do the numbers add up? Anything but 0 is a defect: please report it.",
        f"sum by (identity) (increase({s.IDENTITY_VIOLATIONS.exposed_name}[1d])) > 0",
    ),
    s.VETOES: Answer("Which group brings lookups to zero?", _by_group(s.VETOES)),
    s.OBSERVER_ERRORS: Answer(
        "Does kvlens itself fail?", f"increase({s.OBSERVER_ERRORS.exposed_name}[1h]) > 0"
    ),
    s.DROPPED_FACTS: Answer(
        "Is the drain thread too slow?", f"increase({s.DROPPED_FACTS.exposed_name}[1h]) > 0"
    ),
    s.DROPPED_SPANS: Answer(
        "Is the OTLP receiver too slow, or away?",
        f"increase({s.DROPPED_SPANS.exposed_name}[1h]) > 0",
    ),
    s.DROPPED_RECORDS: Answer(
        "Is the flight recorder's disk too slow, or full?",
        f"increase({s.DROPPED_RECORDS.exposed_name}[1h]) > 0",
    ),
    s.LOOKUP_WIDTH: Answer(
        "How many chunks does a lookup ask for?",
        _quantile(s.LOOKUP_WIDTH, 0.5, "le, kv_group"),
    ),
    s.LOOKUP_HITS: Answer(
        "How many chunks are found before the pop? Compare with what is served.",
        _quantile(s.LOOKUP_HITS, 0.5, "le, kv_group"),
    ),
    s.LOOKUP_SECONDS: Answer(
        "What do lookups cost the scheduler?", _quantile(s.LOOKUP_SECONDS, 0.99)
    ),
    s.RELOAD_LATENCY: Answer("How long does a reload take?", _quantile(s.RELOAD_LATENCY)),
    s.TRANSFER_SECONDS: Answer(
        "How long is the transfer itself?", _quantile(s.TRANSFER_SECONDS, by="le, direction")
    ),
    s.DEFERRAL_SECONDS: Answer(
        "How long do deferred lookups keep requests waiting?", _quantile(s.DEFERRAL_SECONDS, 0.99)
    ),
    s.RESIDENT_CHUNKS: Answer(
        "How full is the tier? (vLLM's own usage gauge shows transfers in flight.)",
        f"sum by (engine) ({s.RESIDENT_CHUNKS.name}) / sum by (engine) ({s.CAPACITY_CHUNKS.name})",
    ),
    s.CAPACITY_CHUNKS: Answer(
        "How many chunks can be held?", f"sum by (engine) ({s.CAPACITY_CHUNKS.name})"
    ),
    s.DEFERRED_REQUESTS: Answer(
        "Do requests wait for the tier now?", f"max_over_time({s.DEFERRED_REQUESTS.name}[5m])"
    ),
    s.LOOKUP_FALLBACK: Answer(
        "Which engines use vLLM's own lookup although another is configured?",
        f"{s.LOOKUP_FALLBACK.name} == 1",
    ),
    s.INFO: Answer(
        "Which version and configuration served how much?",
        f"sum by (version, lookup) (rate({s.SERVED_TOKENS.exposed_name}[5m]) "
        f"* on (instance, engine) group_left (version, lookup) {s.INFO.name})",
    ),
    s.GROUP_INFO: Answer(
        "Which KV-cache groups does an engine have?",
        f"count by (engine, group_kind) ({s.GROUP_INFO.name})",
    ),
}


@dataclass(frozen=True)
class DashboardMetric:
    """A metric of ``kvlens serve`` about itself."""

    name: str
    type: s.MetricType
    answer: Answer


def _dashboard(name: str, type_: s.MetricType, question: str) -> DashboardMetric:
    if type_ == "counter":
        return DashboardMetric(name, type_, Answer(question, f"increase({name}_total[5m])"))
    if type_ == "gauge":
        return DashboardMetric(name, type_, Answer(question, f"max_over_time({name}[5m])"))
    query = f"histogram_quantile(0.95, rate({name}_bucket[5m]))"
    return DashboardMetric(name, type_, Answer(question, query))


DASHBOARD: Final = (
    _dashboard(s.DASHBOARD_RECORDS, "counter", "Do records arrive?"),
    _dashboard(s.DASHBOARD_DUPLICATES, "counter", "Are records sent more than once?"),
    _dashboard(s.DASHBOARD_DELETED, "counter", "Does retention keep up, and how fast?"),
    _dashboard(s.DASHBOARD_STORE_BYTES, "gauge", "How near is the store to its size limit?"),
    _dashboard(s.DASHBOARD_REJECTED, "counter", "Are spans of kvlens rejected as malformed?"),
    _dashboard(s.DASHBOARD_IGNORED, "counter", "Do spans arrive that are for somebody else?"),
    _dashboard(s.DASHBOARD_METRIC_EXPORTS, "counter", "Are OTLP metrics sent here, to no use?"),
    _dashboard(s.DASHBOARD_BACKPRESSURE, "counter", "Is more sent than can be stored (429)?"),
    _dashboard(s.DASHBOARD_STREAM_DROPPED, "counter", "Are browsers too slow for the stream?"),
    _dashboard(s.DASHBOARD_ERRORS, "counter", "Does the dashboard itself fail?"),
    _dashboard(s.DASHBOARD_OPEN_INCIDENTS, "gauge", "Is anything wrong now?"),
    _dashboard(s.DASHBOARD_STREAM_CLIENTS, "gauge", "Who is watching?"),
    _dashboard(s.DASHBOARD_QUEUE, "gauge", "How much waits to be stored?"),
    _dashboard(s.DASHBOARD_NOTIFICATIONS, "counter", "Are incidents passed on?"),
    _dashboard(s.DASHBOARD_NOTIFY_WAITING, "gauge", "Are notifications held up?"),
    _dashboard(s.DASHBOARD_SCRAPES, "counter", "Are engines scraped, and do scrapes fail?"),
    _dashboard(s.DASHBOARD_SCRAPE_TARGETS, "gauge", "How many engines are scraped?"),
    _dashboard(s.DASHBOARD_INGEST_SECONDS, "histogram", "How long until an export is durable?"),
)


@dataclass(frozen=True)
class Attribute:
    """One attribute of a resource or a span."""

    name: str
    type: str
    meaning: str


@dataclass(frozen=True)
class SpanDoc:
    """One kind of span."""

    name: str
    meaning: str
    parent: str
    attributes: tuple[Attribute, ...]


_LOCAL = Attribute(s.ATTR_LOCAL_TOKENS, "int", "tokens that the GPU cache covered")
_ID = Attribute(s.ATTR_GEN_AI_REQUEST_ID, "string", "request id, as on vLLM's `llm_request`")
_RECORD = Attribute(
    s.ATTR_RECORD, "string", f"RequestRecord as JSON, at most {s.RECORD_MAX_BYTES // 1024} KiB"
)
_REQUEST: Final = (
    _ID,
    Attribute(s.ATTR_GEN_AI_MODEL, "string", "served model name"),
    Attribute(s.ATTR_VERDICT, "string", "what became of the reusable tokens"),
    Attribute(s.ATTR_CAUSE, "string", "why tokens were lost; absent if none were"),
    Attribute(s.ATTR_CONFIDENCE, "string", "`certain`, `likely` or `guess`"),
    Attribute(s.ATTR_VETOING_GROUP, "int", "group that brought the lookup to zero, if one did"),
    Attribute(s.ATTR_PROMPT_TOKENS, "int", "tokens of the prompt"),
    _LOCAL,
    Attribute(s.ATTR_SERVED_TOKENS, "int", "tokens loaded from the offload tier"),
    Attribute(s.ATTR_COMPUTED_TOKENS, "int", "prompt tokens computed; absent if it never ran"),
    Attribute(s.ATTR_SERVABLE_TOKENS, "int", "tokens that were resident and could be served"),
    Attribute(s.ATTR_EXPECTED_TOKENS, "int", "the same, had all been stored and kept"),
    Attribute(s.ATTR_LOST_TOKENS, "int", "tokens computed that should have been served"),
    Attribute(s.ATTR_EVICTED_TOKENS, "int", "tokens computed again that capacity had evicted"),
    Attribute(s.ATTR_LOST_GPU_SECONDS, "double", "device time of computing both of these"),
    _RECORD,
)
_JOB: Final = (
    Attribute(s.ATTR_JOB_ID, "int", "vLLM's transfer job"),
    Attribute(s.ATTR_BYTES, "int", "bytes moved, once known"),
    Attribute(s.ATTR_GROUPS, "int[]", "groups, in group order"),
    Attribute(s.ATTR_GROUP_CHUNKS, "int[]", "chunks moved, per group"),
)
METRIC_RESOURCE: Final = (
    Attribute(s.ATTR_ENGINE_ID, "string", "`engine_id` of vLLM's KV-transfer configuration"),
    Attribute(s.ATTR_DP_RANK, "int", "data-parallel rank"),
)
RESOURCE: Final = (
    Attribute(s.ATTR_SERVICE_NAME, "string", f"`{s.SERVICE_NAME}`"),
    Attribute(s.ATTR_SERVICE_VERSION, "string", "version of kvlens"),
    Attribute(s.ATTR_SERVICE_INSTANCE, "string", "incarnation of the engine: new at each start"),
    Attribute(s.ATTR_ENGINE, "string", "EngineInfo as JSON: model, layout, corrections"),
)
SPANS: Final = (
    SpanDoc(
        s.SPAN_REQUEST,
        "One finished request, from its arrival to its end.",
        "the client's span: a sibling of vLLM's `llm_request`",
        _REQUEST,
    ),
    SpanDoc(
        s.SPAN_LOOKUP,
        "One lookup, or a run of equal deferred ones; the last 32.",
        s.SPAN_REQUEST,
        (
            Attribute(s.ATTR_EXIT, "string", "how it ended"),
            Attribute(s.ATTR_ATTEMPT, "int", "number of the attempt, from 1"),
            Attribute(s.ATTR_COUNT, "int", "equal lookups in a row"),
            _LOCAL,
            Attribute(s.ATTR_GROUPS, "int[]", "groups asked, in the order of asking"),
            Attribute(s.ATTR_GROUP_WIDTHS, "int[]", "chunks asked for, per group"),
            Attribute(s.ATTR_GROUP_HITS, "int[]", "chunks found before the pop; -1: deferred"),
            Attribute(s.ATTR_GROUP_POPS, "int[]", "chunks popped, per group"),
        ),
    ),
    SpanDoc(
        s.SPAN_LOAD,
        "One load, from allocation until the scheduler saw it finished; the last 32.",
        s.SPAN_REQUEST,
        (*_JOB, Attribute(s.ATTR_RELOAD_LATENCY, "double", "its length, in seconds")),
    ),
    SpanDoc(
        s.SPAN_STORE,
        "One store job, in a trace of its own; the last 32.",
        f"none: linked to its {s.SPAN_REQUEST}",
        _JOB,
    ),
    SpanDoc(
        s.SPAN_DEFERRAL,
        "A request that has waited for over 1 s; repeated every 5 s, before the request ends.",
        "the client's span",
        (*_REQUEST, Attribute(s.ATTR_DEFERRED_FOR, "double", "how long so far, in seconds")),
    ),
    SpanDoc(
        s.SPAN_ENGINE,
        "Sent when an engine's connector starts, every minute while it lives, and when it stops.",
        "none",
        (
            Attribute(
                s.ATTR_ENGINE_STATE,
                "string",
                f"`{s.ENGINE_STARTED}`, `{s.ENGINE_ALIVE}` or `{s.ENGINE_STOPPED}`",
            ),
        ),
    ),
)
