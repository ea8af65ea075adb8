"""All checks of one window of scraped numbers: the same for ``doctor`` and for the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvlens.dashboard.model.scrape import LOST
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import local_hits, signs, stores, tiers, zero_hit
from kvlens.dashboard.scrape.findings import Finding, Outcome, fine, found, percent, unknown
from kvlens.dashboard.scrape.window import Window
from kvlens.telemetry.semconv import Cause, Confidence, IncidentKind, Severity, Verdict

Check = Callable[[Window, Thresholds], Outcome]
_NEEDS_KVLENS: Final = "only an engine with kvlens' connector tells"
_LOSING: Final = (Verdict.PARTIAL, Verdict.LOST, Verdict.UNSTORED, Verdict.STALLED)


def lost_hits(window: Window, limits: Thresholds) -> Outcome:
    """More than a tenth of the expected tokens is recomputed, though something is served."""
    kind = IncidentKind.LOST_HITS
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    expected, causes = window.rise("expected_tokens"), window.lost()
    lost, requests = sum(causes.values()), window.verdicts(*_LOSING)
    said = f"{lost:,.0f} of {expected:,.0f} expected tokens were lost"
    few = requests < limits.lost_hits_requests or expected < limits.eligible_min_tokens
    if lost and not window.rise("served_tokens"):
        return fine(kind, f"{said}, and nothing was served: that is zero_hit's to judge")
    if few or lost <= limits.lost_hits_share * expected:
        return fine(kind, said)
    cause = next(iter(causes))
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status=str(Verdict.PARTIAL),
            cause=cause,
            summary=f"{said} ({percent(lost, expected)}) by {requests:,.0f} requests; cause: "
            f"{cause.replace('_', ' ')}",
            evidence={
                "requests": int(requests),
                "expected_tokens": int(expected),
                "served_tokens": int(window.rise("served_tokens")),
                "lost_tokens_by_cause": {name: int(value) for name, value in causes.items()},
                **zero_hit.setup(window),
            },
            next_step=zero_hit.advise(window, cause),
            lost_tokens=int(lost),
        )
    )


def store_gaps(window: Window, limits: Thresholds) -> Outcome:
    """Tokens lost behind gaps in what is stored."""
    kind = IncidentKind.STORE_GAPS
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    lost = window.rise(LOST + Cause.STORE_GAP)
    if lost <= 0:
        return fine(kind, "no token was lost behind a gap")
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status=str(Verdict.PARTIAL),
            cause=str(Cause.STORE_GAP),
            summary=f"{lost:,.0f} tokens stored behind gaps were computed again",
            evidence={"lost_tokens": int(lost), **zero_hit.setup(window)},
            next_step=zero_hit.advise(window, str(Cause.STORE_GAP)),
            lost_tokens=int(lost),
        )
    )


def capacity_thrash(window: Window, limits: Thresholds) -> Outcome:
    """The tier evicts most of what is asked for again."""
    kind = IncidentKind.CAPACITY_THRASH
    if (full := tiers.no_room_to_promote(window, limits)) is not None:
        return found(full)
    if not window.after.instrumented and window.has("promotion_allocation_failures"):
        return fine(kind, "promotions found room, or something was served all the same")
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    served, evicted = window.rise("served_tokens"), window.rise("evicted_tokens")
    requests = window.verdicts(Verdict.EVICTED)
    if window.has("evicted_tokens"):
        share = evicted / (evicted + served) if evicted else 0.0
    else:
        other = window.verdicts(Verdict.FULL, Verdict.PARTIAL)
        share = requests / (requests + other) if requests else 0.0
    said = f"{requests:,.0f} requests came back after their chunks had been evicted"
    if requests < limits.capacity_thrash_requests or share <= limits.capacity_thrash_share:
        return fine(kind, said)
    capacity = window.after.capacity_chunks
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status=str(Verdict.EVICTED),
            cause=str(Cause.CAPACITY),
            summary=f"{said}: {share:.0%} of all reuse",
            evidence={
                "requests_evicted": int(requests),
                "evicted_tokens": int(evicted),
                "served_tokens": int(served),
                "capacity_chunks": None if capacity is None else int(capacity),
                "resident_chunks": int(sum(window.after.resident_chunks.values())),
            },
            next_step="Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use): it must hold "
            "everything that comes between two uses of a prompt.",
            lost_tokens=int(evicted),
        )
    )


def deferral_stall(window: Window, limits: Thresholds) -> Outcome:
    """Lookups were deferred for more than ten seconds, or held up the scheduler."""
    kind = IncidentKind.DEFERRAL_STALL
    stalled = window.verdicts(Verdict.STALLED)
    beyond, blocked = window.rise("delays_beyond"), window.rise("lookups_beyond")
    held = tiers.held_back(window, limits)
    if blocked < limits.deferral_stall_requests:
        blocked = 0.0  # one slow step is a hiccup
    number = max(stalled, beyond, held)
    if not number and not blocked:
        return fine(kind, "no lookup waited for long")
    many = max(stalled, beyond) >= limits.deferral_stall_requests
    causes = {name: int(window.rise(LOST + name)) for name in
              (str(Cause.PENDING_STORE), str(Cause.RETRY_STALL))}  # fmt: skip
    cause = max(causes, key=lambda name: causes[name]) if any(causes.values()) else None
    waited = f"{number:,.0f} requests waited over {limits.deferral_stall_seconds:.0f} s for an "
    waited += "answer of the tier, or gave up waiting"
    held_up = f"{blocked:,.0f} lookups took over 1 s each, while which no request was scheduled"
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.CRITICAL if many else Severity.WARNING,
            confidence=Confidence.CERTAIN if stalled or beyond or blocked else Confidence.GUESS,
            status=str(Verdict.STALLED),
            cause=cause,
            summary=waited if number else held_up,
            evidence={
                "requests_stalled": int(stalled),
                "delays_beyond_10_s": int(beyond),
                "lookups_beyond_1_s": int(blocked),
                **tiers.lookups(window),
            },
            next_step="Check the offload worker and the tier's backend of this engine: either "
            "stores that were accepted do not complete, or the tier answers 'later' forever. "
            "Until it is well, take it out of the tiers or cap the load with max_load_tokens.",
        )
    )


def store_failures(window: Window, limits: Thresholds) -> Outcome:
    """The tier refuses stores or promotions: a warning, since what was lost by it is not known."""
    kind = IncidentKind.STORE_FAILURES
    counts = {
        name: int(window.rise(name))
        for name in ("allocation_failures", "promotion_failures", "cascade_failures")
    }
    if not signs.hits(window) and not signs.loads(window):
        # Told as what it is, a first tier without room: see capacity_thrash.
        counts["promotion_failures"] -= int(window.rise("promotion_allocation_failures"))
    failed = sum(counts.values())
    refused = window.rise("refused_chunks")
    stores = window.rise("store_jobs")
    if failed < limits.store_failures_count and refused < limits.store_failures_count:
        return fine(kind, f"{failed:,} stores or promotions failed")
    tried = failed + stores if failed else refused + window.rise("stored_chunks")
    if max(failed, refused) <= limits.store_failures_share * tried:
        return fine(kind, f"{max(failed, refused):,.0f} of {tried:,.0f} stores failed")
    loads = max(window.rise("load_bytes"), window.rise("tier_read_bytes"))
    goes_on = "while loads go on" if loads > 0 else "and nothing was loaded"
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status=str(Verdict.UNSTORED),
            cause=str(Cause.ALLOCATION_FAILURE),
            summary=f"{failed:,} stores and promotions failed and {refused:,.0f} chunks were "
            f"refused, {goes_on}",
            evidence={
                **counts,
                "refused_chunks": int(refused),
                "store_jobs": int(stores),
                "load_bytes": int(loads),
                "tier_queries": int(window.rise("tier_queries")),
                "tier_hits": int(window.rise("tier_hits")),
            },
            next_step="Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use), or lower the "
            "number of requests at a time: slots that are being read or written cannot be "
            "evicted. Failed promotion jobs point to the second tier's backend.",
        )
    )


def unsafe_boundary(window: Window, limits: Thresholds) -> Outcome:
    """Wrong KV data was served or stored."""
    kind = IncidentKind.UNSAFE_BOUNDARY
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    unsafe = window.verdicts(Verdict.UNSAFE)
    if not unsafe:
        return fine(kind, "no request was served a boundary without a state")
    cause = str(Cause.MISALIGNED_STATE)
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.CRITICAL,
            confidence=Confidence.CERTAIN,
            status=str(Verdict.UNSAFE),
            cause=cause,
            summary=f"{unsafe:,.0f} requests were served, or stored, KV data that does not belong "
            f"to its position: outputs may be wrong",
            evidence={"requests_unsafe": int(unsafe), **zero_hit.setup(window)},
            next_step=zero_hit.advise(window, cause),
        )
    )


def telemetry_lost(window: Window, limits: Thresholds) -> Outcome:
    """Facts or spans were dropped, or kvlens itself failed."""
    kind = IncidentKind.TELEMETRY_LOST
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    counts = {
        name: int(window.rise(name)) for name in ("dropped_facts", "dropped_spans",
                                                  "observer_errors")
    }  # fmt: skip
    if not any(counts.values()):
        return fine(kind, "nothing was dropped")
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status="",
            summary=f"{counts['dropped_facts']:,} facts and {counts['dropped_spans']:,} spans were "
            f"dropped, {counts['observer_errors']:,} errors of kvlens were contained: numbers are "
            f"lower bounds",
            evidence=counts,
            next_step="Spans are dropped while the OTLP endpoint is slow or away (bring it up, or "
            "lower sample_rate), facts while the engine's process is starved (raise queue_size). "
            "Errors are in the engine's log, once per kind: attach them to an issue.",
        )
    )


def lookup_fallback(window: Window, limits: Thresholds) -> Outcome:
    """The engine went over to vLLM's own lookup by itself."""
    kind = IncidentKind.LOOKUP_FALLBACK
    if not window.after.instrumented:
        return unknown(kind, _NEEDS_KVLENS)
    if not window.after.fallback:
        return fine(kind, "the configured lookup is in use")
    return found(
        Finding(
            kind=str(kind),
            severity=Severity.WARNING,
            confidence=Confidence.CERTAIN,
            status="",
            summary="an invariant of kvlens' lookup failed, so that this engine uses vLLM's own "
            "until it is restarted: what that one gets wrong is not corrected",
            evidence=zero_hit.setup(window),
            next_step="The reason is in the engine's log: attach it to an issue, then restart the "
            "engine.",
        )
    )


CHECKS: Final[tuple[Check, ...]] = (
    zero_hit.check, lost_hits, store_gaps, capacity_thrash, deferral_stall, store_failures,
    unsafe_boundary, telemetry_lost, lookup_fallback, stores.nothing_stored, stores.low_hits,
    local_hits.check,
)  # fmt: skip


def examine(window: Window, limits: Thresholds) -> list[Outcome]:
    """The outcomes of all checks."""
    return [check(window, limits) for check in CHECKS]
