"""Alert rules. Their numbers are the detectors' (``Thresholds``), so that both say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from grafana import recording
from grafana.promql import PER_ENGINE, PER_TARGET, any_of, kvlens, quantile, rise, vllm
from grafana.recording import stock
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.signs import PREEMPTED_TOKENS
from kvlens.dashboard.shipped import PUBLISHED_RUNBOOKS
from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Cause, IncidentKind, Severity, Verdict

LIMITS: Final = Thresholds()
RUNBOOKS: Final = PUBLISHED_RUNBOOKS
"""Default of ``--runbooks``: where ``docs/runbooks`` is published."""
WHERE: Final = "{{ $labels.model_name }}, engine {{ $labels.engine }} at {{ $labels.instance }}"
OBJECTIVE: Final = 0.99
"""Share of servable tokens that should be served; the rest is the budget that burns."""
BURNS: Final = (
    # (factor, long window, short window, for, label)
    (14.4, "1h", "5m", "2m", "fast"),
    (6.0, "6h", "30m", "15m", "fast"),
    (3.0, "1d", "2h", "1h", "slow"),
    (1.0, "3d", "6h", "3h", "slow"),
)
BURN_DEMAND: Final = 10_000
"""Servable tokens of the long window below which a share says nothing."""
STOCK_WARM: Final = "5m"
"""A stock engine must have stored something this long ago; with ``for``, 10 minutes in all."""
LOSING: Final = (Verdict.LOST, Verdict.UNSTORED, Verdict.STALLED)


@dataclass(frozen=True)
class Alert:
    """One alerting rule; ``summary`` follows the name of the engine."""

    name: str
    kind: IncidentKind
    severity: Severity
    expr: str
    wait: str
    summary: str
    description: str
    labels: dict[str, str] = field(default_factory=dict)
    keep: str = "5m"
    where: str = WHERE

    @property
    def page(self) -> str:
        """Name of the runbook, without its suffix."""
        return str(self.kind)

    def rule(self, runbooks: str = RUNBOOKS) -> dict[str, Any]:
        """As in a rule file."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "keep_firing_for": self.keep,
            "labels": {
                s.LABEL_SEVERITY: str(self.severity),
                s.LABEL_INCIDENT_KIND: str(self.kind),
                **self.labels,
            },
            "annotations": {
                "summary": f"{self.where}: {self.summary}",
                "description": self.description,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.page}.md",
            },
        }


def _zero_hit_instrumented(window: str) -> str:
    expected = rise(s.EXPECTED_TOKENS, window)
    requests = f"round({rise(s.REQUESTS, window, verdict=any_of(LOSING))})"
    return (
        f"({expected} and {rise(s.SERVED_TOKENS, window)} == 0 "
        f"and {requests} >= {LIMITS.zero_hit_requests} "
        # A remainder below a chunk is not a finding: each must have been worth something.
        f"and {expected} / {requests} >= {LIMITS.eligible_min_tokens})"
    )


def _others_hits(window: str = recording.STOCK_WINDOW) -> str:
    """Local hits without those that preempted requests may have had on their own blocks."""
    found = stock("local_hits", window)
    return f"(({found} - {PREEMPTED_TOKENS} * {stock('preemptions', window)}) or {found})"


def _zero_hit_stock() -> str:
    evicts = (
        f"(engine:vllm_kv_cache_usage:max10m >= {LIMITS.scrape_gpu_usage} "
        f"or {stock('preemptions')} > 0 or {stock('gpu_evictions')} > 0)"
    )
    answers = f"{stock('local_hits')} / {stock('local_queries')} >= {LIMITS.scrape_local_answers}"
    now = f"{_others_hits()} / {stock('local_queries')} >= {LIMITS.scrape_local_share}"
    long = recording.STOCK_HISTORY
    before = (
        f"{_others_hits(long)} / {stock('local_queries', long)} >= {2 * LIMITS.scrape_local_share}"
    )
    stored = stock("kv_offload_store_bytes")
    instrumented = f"{kvlens(s.EXPECTED_TOKENS)}"
    restarted = f"changes(process_start_time_seconds[{recording.STOCK_WINDOW}]) > 0"
    return (
        f"((((({stored} > 0 and {stock('external_queries')} >= {LIMITS.scrape_queries_tokens}) "
        # Warm: what is asked for now had time to come into the tier.
        f"and {stored} offset {STOCK_WARM} > 0) "
        f"and {evicts}) and ({now} or {before})) "
        f"unless {stock('external_hits')} > 0 unless {stock('kv_offload_load_bytes')} > 0 "
        # What the GPU cache does not have is then the new end of each prompt.
        f"unless {answers}) "
        f"unless {PER_ENGINE} {instrumented} unless {PER_TARGET} {restarted}"
    )


def zero_hit() -> list[Alert]:
    """Nothing is served any more."""
    return [
        Alert(
            "KVOffloadZeroHit",
            IncidentKind.ZERO_HIT,
            Severity.CRITICAL,
            f"{_zero_hit_instrumented('10m')} or {_zero_hit_instrumented('30m')}",
            "1m",
            "0 of {{ $value | humanize }} tokens that offloading should have served were served",
            "At least 3 requests had their KV data computed before, and none was given any of it.",
            {"form": "instrumented"},
        ),
        Alert(
            "KVOffloadZeroHit",
            IncidentKind.ZERO_HIT,
            Severity.CRITICAL,
            _zero_hit_stock(),
            "5m",
            "{{ $value | humanize1024 }}B stored in 10 min and nothing loaded, while the GPU cache "
            "evicts and prompts come back",
            "Likely, not certain: a server without kvlens does not tell what its tier holds.",
            {"form": "stock"},
        ),
    ]


def lost_tokens() -> list[Alert]:
    """Burn rates of the objective, each over two windows."""
    budget = 1 - OBJECTIVE
    return [
        Alert(
            "KVOffloadLostTokens",
            IncidentKind.LOST_HITS,
            Severity.WARNING,
            f"({recording.unserved(long)} > {factor * budget:.4g} "
            f"and {recording.unserved(short)} > {factor * budget:.4g}) "
            f"and increase({kvlens(s.SERVABLE_TOKENS)}[{long}]) >= {BURN_DEMAND}",
            wait,
            f"{{{{ $value | humanizePercentage }}}} of the tokens that were resident and servable "
            f"in {long} were computed again",
            f"{factor:g} times what an objective of {OBJECTIVE:.0%} allows, over {long} and still "
            f"over {short}.",
            {"burn": speed, "window": long},
        )
        for factor, long, short, wait, speed in BURNS
    ]


def losses() -> list[Alert]:
    """What is lost on the way into the tier, or to its size."""
    thrash, gaps = "30m", "30m"
    evicted, served = rise(s.EVICTED_TOKENS, thrash), rise(s.SERVED_TOKENS, thrash)
    evictions = f"round({rise(s.REQUESTS, thrash, verdict=str(Verdict.EVICTED))})"
    gap_causes = any_of((Cause.STORE_GAP, Cause.TAIL_HELD_BACK))
    return [
        Alert(
            "KVOffloadStoreGaps",
            IncidentKind.STORE_GAPS,
            Severity.WARNING,
            f"{rise(s.LOST_TOKENS, gaps, cause=gap_causes)} >= {LIMITS.eligible_min_tokens}",
            "1m",
            "{{ $value | humanize }} tokens behind gaps in what is stored were computed again in "
            f"{gaps}",
            "Chunks that were computed never reached the tier: a prefix ends where one is missing.",
        ),
        Alert(
            "KVOffloadCapacityThrash",
            IncidentKind.CAPACITY_THRASH,
            Severity.WARNING,
            f"{evicted} / ({evicted} + {served} > 0) > {LIMITS.capacity_thrash_share} "
            f"and {evictions} >= {LIMITS.capacity_thrash_requests}",
            "5m",
            "{{ $value | humanizePercentage }} of the tokens that came back had been evicted",
            f"Over {thrash}: the tier is smaller than what comes between two uses of a prompt.",
        ),
    ]


def faults() -> list[Alert]:
    """What should not happen at all."""
    delays = "kv_offload_lookup_async_delay_seconds_bucket"
    all_delays, short_delays = (
        f"sum without (le) ({vllm(delays, window='5m', func='increase', le=edge)})"
        for edge in ("=+Inf", "=10.0")
    )
    waits = f"{s.DEFERRAL_SECONDS.name}_bucket"
    ours = (
        f"(sum without (le) (increase({waits}{{le=\"+Inf\"}}[5m])) "
        f"- sum without (le) (increase({waits}{{le=\"10.0\"}}[5m])))"
    )  # fmt: skip
    now = f"min_over_time({kvlens(s.DEFERRED_REQUESTS)}[1m])"
    stalled = rise(s.REQUESTS, "5m", verdict=str(Verdict.STALLED))
    refused, stored = rise(s.REFUSED_CHUNKS, "5m"), rise(s.STORED_CHUNKS, "5m")
    failures, jobs = stock("allocation_failures"), stock("store_jobs")
    share, count = LIMITS.store_failures_share, LIMITS.store_failures_count
    return [
        Alert(
            "KVOffloadDeferralStall",
            IncidentKind.DEFERRAL_STALL,
            Severity.WARNING,
            f"(round({stalled}) > 0 or round({ours}) > 0 or {now} > 0) "
            f"or round({all_delays} - {short_delays}) > 0 "
            f"unless {PER_ENGINE} {kvlens(s.EXPECTED_TOKENS)}",
            "0s",
            "{{ $value | humanize }} requests wait, or waited over 10 s, for an answer of the tier",
            "Lookups are deferred again and again: stores that never end, or retries that restart.",
        ),
        Alert(
            "KVOffloadStoreFailures",
            IncidentKind.STORE_FAILURES,
            Severity.WARNING,
            f"({refused} >= {count} "
            f"and {refused} / ({refused} + ({stored} or {refused} * 0)) > {share}) "
            f"or ({failures} >= {count} "
            f"and {failures} / ({failures} + ({jobs} or {failures} * 0)) > {share}) "
            f"unless {PER_ENGINE} {kvlens(s.EXPECTED_TOKENS)}",
            "5m",
            "{{ $value | humanize }} stores refused for want of a slot that can be evicted",
            "Slots that are being read or written cannot be evicted.",
        ),
        Alert(
            "KVOffloadUnsafeBoundary",
            IncidentKind.UNSAFE_BOUNDARY,
            Severity.CRITICAL,
            f"round({rise(s.REQUESTS, '1h', verdict=str(Verdict.UNSAFE))}) > 0",
            "0s",
            "{{ $value | humanize }} requests got, or stored, KV data of another position",
            "A recurrent group has no state at that boundary: outputs may be wrong.",
            keep="1h",
        ),
        Alert(
            "KVOffloadSlowReload",
            IncidentKind.SLOW_RELOAD,
            Severity.WARNING,
            slow_reload(),
            "5m",
            "95 % of reloads end within {{ $value | humanizeDuration }}, more than twice as long "
            "as in the day before",
            "Same engine; the day before ends an hour ago. At least 30 loads on both sides.",
        ),
    ]


def slow_reload() -> str:
    """95th percentile against the engine's own day before."""
    recent, past = "10m", "1d"
    count = f"{s.RELOAD_LATENCY.name}_count"
    bucket = f"rate({s.RELOAD_LATENCY.name}_bucket[{past}] offset 1h)"
    return (
        f"{quantile(s.RELOAD_LATENCY, 0.95, recent)} "
        f"> {LIMITS.slow_reload_factor:g} * histogram_quantile(0.95, {bucket}) "
        f"and increase({count}[{recent}]) >= {LIMITS.slow_reload_loads} "
        f"and increase({count}[{past}] offset 1h) >= {LIMITS.slow_reload_loads}"
    )


def telemetry() -> list[Alert]:
    """kvlens itself: what it dropped, and whether it is still there."""
    # A label for each, so that `or` keeps all and an absent one does not hide the others.
    dropped = " or ".join(
        f'label_replace({rise(metric, "10m")}, "of", "{metric.name}", "", "")'
        for metric in (s.DROPPED_FACTS, s.DROPPED_SPANS, s.DROPPED_RECORDS, s.OBSERVER_ERRORS)
    )
    known = kvlens(s.EXPECTED_TOKENS)
    return [
        Alert(
            "KVLensTelemetryLost",
            IncidentKind.TELEMETRY_LOST,
            Severity.WARNING,
            f"round(sum without (of) ({dropped})) > 0",
            "0s",
            "{{ $value | humanize }} facts, spans or records were dropped, or errors contained, "
            "in 10 min",
            "Numbers of this engine are lower bounds, and causes less sure.",
            {"form": "dropped"},
        ),
        Alert(
            "KVLensTelemetryLost",
            IncidentKind.TELEMETRY_LOST,
            Severity.WARNING,
            # A target that is no longer configured has no `up`: that engine is gone, not lost.
            f"(max_over_time({known}[30m]) unless {known}) and {PER_TARGET} up",
            "5m",
            "its metrics of kvlens are missing though it had them half an hour ago",
            "The engine does not answer, or was started again without kvlens' connector.",
            {"form": "absent"},
        ),
    ]


def alerts() -> list[Alert]:
    """All of them, the worst first."""
    return [*zero_hit(), *lost_tokens(), *losses(), *faults(), *telemetry()]


def groups(runbooks: str = RUNBOOKS) -> list[dict[str, Any]]:
    """Groups of the alert rule file."""
    return [{"name": "kvlens-alerts", "rules": [item.rule(runbooks) for item in alerts()]}]
