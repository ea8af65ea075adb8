"""``zero_hit`` from numbers alone: proven on an instrumented engine, inferred on a stock one."""

from __future__ import annotations

from typing import Any, Final

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import signs
from kvlens.dashboard.scrape.findings import Finding, Outcome, fine, found, unknown
from kvlens.dashboard.scrape.window import Window
from kvlens.dashboard.view.format import size
from kvlens.telemetry.semconv import Cause, Confidence, IncidentKind, Severity, Verdict
from kvlens.telemetry.verdict.advice import next_step

KIND: Final = IncidentKind.ZERO_HIT
_LOAD_CONNECTOR: Final = (
    "Load KVLensOffloadingConnector (kv_connector_module_path: kvlens.connector, lookup: stock "
    "changes nothing): it tells for each request what was in the tier and which group refused it. "
    "On vLLM 0.29.0 and older with speculative decoding, upgrade to 0.30.0 or newer, or set "
    "lookup: corrected."
)

_ANY_CONNECTOR: Final = (
    "Send one long prompt twice, with others in between that fill the GPU cache, and compare the "
    "time to the first token; look into the connector's own log and metrics for stores. vLLM "
    "counts the queries and hits of any connector; nothing else on this page tells what it stored."
)


def check(window: Window, limits: Thresholds) -> Outcome:
    """Whether nothing is served any more, though it should be."""
    if window.after.instrumented:
        return _instrumented(window, limits)
    if not window.after.offloads:
        return unknown(KIND, "no KV connector was asked for anything: is offloading on?")
    return _inferred(window, limits)


def _instrumented(window: Window, limits: Thresholds) -> Outcome:
    expected, served = window.rise("expected_tokens"), window.rise("served_tokens")
    if served:
        return fine(KIND, f"{served:,.0f} of {expected:,.0f} expected tokens were served")
    lost = window.verdicts(Verdict.LOST, Verdict.UNSTORED, Verdict.STALLED)
    if expected < limits.eligible_min_tokens or lost < limits.zero_hit_requests:
        return fine(KIND, f"{lost:,.0f} requests lost anything, {expected:,.0f} tokens were due")
    causes = window.lost()
    cause = next(iter(causes), None)
    dropped = window.rise("dropped_facts")
    why = f"; cause: {cause.replace('_', ' ')}" if cause else ""
    return found(
        Finding(
            kind=str(KIND),
            severity=Severity.CRITICAL,
            confidence=Confidence.LIKELY if dropped else Confidence.CERTAIN,
            status=str(Verdict.LOST),
            cause=cause,
            summary=f"{lost:,.0f} requests were served 0 of {expected:,.0f} tokens that "
            f"offloading should have served{why}",
            evidence={
                "requests_lost": int(lost),
                "expected_tokens": int(expected),
                "servable_tokens": int(window.rise("servable_tokens")),
                "served_tokens": 0,
                "lost_tokens_by_cause": {name: int(value) for name, value in causes.items()},
                **setup(window),
            },
            next_step=advise(window, cause) or _LOAD_CONNECTOR,
            lost_tokens=int(sum(causes.values())),
        )
    )


def setup(window: Window) -> dict[str, Any]:
    """What ``kvlens_info`` says of the engine, for evidence."""
    info = window.after.info
    return {
        name: info[name]
        for name in ("vllm_version", "version", "lookup", "drafter_groups", "layout")
        if name in info
    }


def advise(window: Window, cause: str | None) -> str:
    """The next step for a cause, with the numbers that a page has."""
    if cause is None:
        return ""
    sizes = [int(part.rpartition("/")[2]) for part in window.after.info.get("layout", "").split(",")
             if part.rpartition("/")[2].isdecimal()]  # fmt: skip
    if cause not in {str(member) for member in Cause}:
        return ""
    facts: dict[str, Any] = {"largest_chunk": max(sizes, default=0)}
    if window.after.capacity_chunks is not None:
        facts["capacity"] = f"{window.after.capacity_chunks:,.0f}"
    try:
        return next_step(Cause(cause), facts)
    except ValueError:  # a number of a single request is asked for, with a format
        return (
            f"Send records to a dashboard (otlp_endpoint), or look at the flight recorder with "
            f"kvlens inspect: they show which request lost what by {cause.replace('_', ' ')}."
        )


def _inferred(window: Window, limits: Thresholds) -> Outcome:
    """Silent unless everything speaks for it: what is resident cannot be seen from outside."""
    if (outcome := _nothing_to_tell(window, limits)) is not None:
        return outcome
    evicts = signs.evicts(window, limits)
    if evicts is None:
        usage = "" if window.usage is None else f" (used to {window.usage:.0%} at most)"
        return fine(KIND, f"nothing shows that the GPU cache evicts{usage}: it answers itself")
    if not signs.warm(window, limits):
        return unknown(KIND, "nothing had been stored before: the tier may still be filling")
    reuse = signs.reuse(window, limits)
    if reuse is None:
        return unknown(KIND, signs.no_reuse(window))
    asked = f"0 of {window.rise('external_queries'):,.0f} tokens"
    # Only stores that are seen prove that there was something to load.
    if blind := signs.stored(window) is None:
        said = f"{asked} asked of the KV connector were hits"
    else:
        said = f"{signs.stored_text(window)} were stored and nothing was loaded: {asked} asked of "
        said += "the tier were hits"
    return found(
        Finding(
            kind=str(KIND),
            severity=Severity.WARNING if blind else Severity.CRITICAL,
            confidence=Confidence.GUESS if blind else Confidence.LIKELY,
            status=str(Verdict.LOST),
            summary=f"{said}, while {evicts} and {reuse}",
            evidence=_evidence(window),
            next_step=_ANY_CONNECTOR if blind or window.after.other else _LOAD_CONNECTOR,
        )
    )


def _nothing_to_tell(window: Window, limits: Thresholds) -> Outcome | None:
    """What rules a finding out before anything is weighed."""
    hits, loads = signs.hits(window), signs.loads(window)
    if window.restarted:
        return unknown(KIND, signs.RESTARTED)
    if hits > 0 or loads > 0:
        amount = size(loads) if window.rise("load_bytes") else f"{loads:,.0f} chunks"
        return fine(KIND, f"{hits:,.0f} tokens were hits and {amount} were loaded")
    if (short := signs.short(window, limits)) is not None:
        return unknown(KIND, short)
    if (read := window.rise("tier_read_bytes")) > 0:
        return unknown(KIND, f"{size(read)} were read from a second tier, whatever came of it")
    if failed := window.rise("promotion_allocation_failures"):
        return unknown(
            KIND, f"{failed:,.0f} promotions found no room in the first tier: that is "
            f"capacity_thrash's to judge"
        )  # fmt: skip
    if signs.stored(window) == 0:
        return unknown(KIND, "nothing was stored in between")
    if (role := signs.prefills_only(window)) is not None:
        return unknown(KIND, role)
    if window.after.transfers and not signs.tells_stores(window):
        return unknown(KIND, "NIXL passes KV to decode servers; the one that prefills has no hits")
    if (itself := signs.answers_itself(window, limits)) is not None:
        return fine(KIND, itself)
    return None


def _evidence(window: Window) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "external_queries": int(window.rise("external_queries")),
        "external_hits": 0,
        "gpu_cache_usage": window.usage,
        "preemptions": int(window.rise("preemptions")),
        "local_queries": int(window.rise("local_queries")),
        "local_hits": int(signs.local_hits(window)),
        "seconds": window.seconds,
    }
    if window.has("store_bytes"):
        facts["store_bytes"] = int(window.rise("store_bytes"))
        facts["load_bytes"] = 0
        facts["load_bytes_series"] = "present" if window.has("load_bytes") else "absent"
    if window.after.other:
        facts["connector"] = window.after.other
    for name in ("other_stored", "other_failed", "tier_queries", "tier_hits", "lookups"):
        if window.has(name):
            facts[name] = int(window.rise(name))
    return facts
