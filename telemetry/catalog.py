"""What each metric answers: the source of docs/metrics.md.

Names come from :mod:`semconv`. A test fails when something declared there is not
explained here, or when the document has drifted.
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
        f"sum by (instance, engine) (rate({part.exposed_name}[1h])) / "
        f"sum by (instance, engine) (rate({whole.exposed_name}[1h]))"
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
        f"sum by (instance, engine) ({s.RESIDENT_CHUNKS.name}) / "
        f"sum by (instance, engine) (rate({s.EVICTED_CHUNKS.exposed_name}[1h]))",
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
        f"sum by (instance, engine) (rate({s.SERVED_TOKENS.exposed_name}[5m]))",
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
        f"sum by (instance, engine) (rate({s.EVICTED_TOKENS.exposed_name}[5m]))",
    ),
    s.LOST_GPU_SECONDS: Answer(
        "What do losses cost, in devices kept busy?",
        f"sum by (cause) (rate({s.LOST_GPU_SECONDS.exposed_name}[1h]))",
    ),
    s.PREFILL_RATE: Answer(
        "How fast does an engine compute prompts?",
        f"min by (instance, engine) ({s.PREFILL_RATE.name})",
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
        f'{s.HIT_RATIO.name}{{capacity="2"}} - ignoring(capacity) '
        f'{s.HIT_RATIO.name}{{capacity="1"}}',
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
        f"sum by (instance, engine) ({s.RESIDENT_CHUNKS.name}) / "
        f"sum by (instance, engine) ({s.CAPACITY_CHUNKS.name})",
    ),
    s.CAPACITY_CHUNKS: Answer(
        "How many chunks can be held?", f"sum by (instance, engine) ({s.CAPACITY_CHUNKS.name})"
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
        f"count by (instance, engine, group_kind) ({s.GROUP_INFO.name})",
    ),
}


@dataclass(frozen=True)
class DashboardMetric:
    """A metric of ``kvlens serve`` about itself."""

    name: str
    type: s.MetricType
    unit: str
    labels: tuple[str, ...]
    answer: Answer


def _dashboard(
    name: str, type_: s.MetricType, unit: str, question: str, *labels: str
) -> DashboardMetric:
    query = f"max_over_time({name}[5m])"
    if type_ == "counter":
        query = f"increase({name}_total[5m])"
    elif type_ == "histogram":
        query = f"histogram_quantile(0.95, rate({name}_bucket[5m]))"
    return DashboardMetric(name, type_, unit, labels, Answer(question, query))


DASHBOARD: Final = (
    _dashboard(s.DASHBOARD_RECORDS, "counter", "{record}", "Do records arrive?"),
    _dashboard(s.DASHBOARD_DUPLICATES, "counter", "{record}", "Are records sent more than once?"),
    _dashboard(s.DASHBOARD_DELETED, "counter", "{record}", "Does retention keep up, and how fast?"),
    _dashboard(s.DASHBOARD_STORE_BYTES, "gauge", "By", "How near is the store to its size limit?"),
    _dashboard(
        s.DASHBOARD_REJECTED, "counter", "{span}", "Are spans of kvlens rejected as malformed?"
    ),
    _dashboard(
        s.DASHBOARD_IGNORED, "counter", "{span}", "Do spans arrive that are for somebody else?"
    ),
    _dashboard(
        s.DASHBOARD_METRIC_EXPORTS, "counter", "{export}", "Are OTLP metrics sent here, to no use?"
    ),
    _dashboard(
        s.DASHBOARD_BACKPRESSURE, "counter", "{export}", "Is more sent than can be stored (429)?"
    ),
    _dashboard(
        s.DASHBOARD_STREAM_DROPPED, "counter", "{event}", "Are browsers too slow for the stream?"
    ),
    _dashboard(s.DASHBOARD_ERRORS, "counter", "{error}", "Does the dashboard itself fail?"),
    _dashboard(s.DASHBOARD_OPEN_INCIDENTS, "gauge", "{incident}", "Is anything wrong now?"),
    _dashboard(s.DASHBOARD_STREAM_CLIENTS, "gauge", "{client}", "Who is watching?"),
    _dashboard(s.DASHBOARD_QUEUE, "gauge", "{export}", "How much waits to be stored?"),
    _dashboard(
        s.DASHBOARD_NOTIFICATIONS,
        "counter",
        "{notification}",
        "Are incidents passed on?",
        s.LABEL_TARGET,
        s.LABEL_OUTCOME,
    ),
    _dashboard(s.DASHBOARD_NOTIFY_WAITING, "gauge", "{notification}", "Are notifications held up?"),
    _dashboard(
        s.DASHBOARD_SCRAPES,
        "counter",
        "{scrape}",
        "Are engines scraped, and do scrapes fail?",
        s.LABEL_OUTCOME,
    ),
    _dashboard(
        s.DASHBOARD_SCRAPE_TARGETS,
        "gauge",
        "{target}",
        "How many engines are scraped?",
        s.LABEL_STATE,
    ),
    _dashboard(
        s.DASHBOARD_INGEST_SECONDS, "histogram", "s", "How long until an export is durable?"
    ),
)
