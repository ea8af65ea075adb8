"""``zero_hit`` from numbers alone: proven on an instrumented engine, inferred on a stock one."""

from __future__ import annotations

from typing import Any, Final

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.findings import Finding, Outcome, fine, found, percent, unknown
from kvlens.dashboard.scrape.window import Window
from kvlens.dashboard.view.format import size
from kvlens.telemetry.advice import next_step
from kvlens.telemetry.semconv import Cause, Confidence, IncidentKind, Severity, Verdict

KIND: Final = IncidentKind.ZERO_HIT
_TURNOVER: Final = 2.0
"""GPU caches full of new tokens after which older ones must have been evicted."""
_HALF_USED: Final = 0.5
"""Below this much use even that is doubted: silence is cheaper than a false alarm."""
_MUCH: Final = 20
"""Multiples of the least queries that cannot be a warm-up any more."""
_LOAD_CONNECTOR: Final = (
    "Load KVLensOffloadingConnector (kv_connector_module_path: kvlens.connector, lookup: stock "
    "changes nothing): it tells for each request what was in the tier and which group refused it. "
    "On vLLM 0.29.0 and older with speculative decoding, upgrade to 0.30.0 or newer, or set "
    "lookup: corrected."
)


def check(window: Window, limits: Thresholds) -> Outcome:
    """Whether nothing is served any more, though it should be."""
    if window.after.instrumented:
        return _instrumented(window, limits)
    if not window.has("store_bytes"):
        return unknown(KIND, "no offload connector reports bytes stored: is offloading on?")
    return _stock(window, limits)


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


def _stock(window: Window, limits: Thresholds) -> Outcome:
    """Silent unless everything speaks for it: what is resident cannot be seen from outside."""
    hits, loads = window.rise("external_hits"), window.rise("load_bytes")
    stored, asked = window.rise("store_bytes"), window.rise("external_queries")
    if window.restarted:
        return unknown(KIND, "the server restarted in between: its caches began empty")
    if hits > 0 or loads > 0:
        return fine(KIND, f"{hits:,.0f} tokens were hits and {size(loads)} were loaded")
    if (read := window.rise("tier_read_bytes")) > 0:
        return unknown(KIND, f"{size(read)} were read from a second tier, whatever came of it")
    if stored <= 0:
        return unknown(KIND, "nothing was stored in between")
    if asked < limits.scrape_queries_tokens:
        return unknown(
            KIND, f"only {asked:,.0f} tokens were asked of the tier "
            f"(at least {limits.scrape_queries_tokens:,} are needed)"
        )  # fmt: skip
    if window.seconds is not None and window.seconds < 0.9 * limits.scrape_window_seconds:
        return unknown(
            KIND, f"{window.seconds:.0f} s are too short to tell "
            f"({limits.scrape_window_seconds:.0f} s are needed)"
        )  # fmt: skip
    evicts = _evicts(window, limits)
    if evicts is None:
        usage = "" if window.usage is None else f" (used to {window.usage:.0%} at most)"
        return fine(KIND, f"nothing shows that the GPU cache evicts{usage}: it answers itself")
    if not _warm(window, limits):
        return unknown(KIND, "nothing had been stored before: the tier may still be filling")
    reuse = _reuse(window, limits)
    if reuse is None:
        return unknown(
            KIND, "no prompt had a prefix in common with an earlier one, as far as local hits "
            "show: there may be nothing to serve"
        )  # fmt: skip
    return found(
        Finding(
            kind=str(KIND),
            severity=Severity.CRITICAL,
            confidence=Confidence.LIKELY,
            status=str(Verdict.LOST),
            summary=f"{size(stored)} were stored and nothing was loaded: 0 of {asked:,.0f} tokens "
            f"asked of the tier were hits, while {evicts} and {reuse}",
            evidence={
                "store_bytes": int(stored),
                "load_bytes": 0,
                "load_bytes_series": "present" if window.has("load_bytes") else "absent",
                "external_queries": int(asked),
                "external_hits": 0,
                "gpu_cache_usage": window.usage,
                "preemptions": int(window.rise("preemptions")),
                "local_queries": int(window.rise("local_queries")),
                "local_hits": int(window.rise("local_hits")),
                "seconds": window.seconds,
            },
            next_step=_LOAD_CONNECTOR,
        )
    )


def _evicts(window: Window, limits: Thresholds) -> str | None:
    """How it shows that the GPU cache evicts; None if it does not."""
    usage = window.usage
    if usage is not None and usage >= limits.scrape_gpu_usage:
        return f"the GPU cache was full to {usage:.0%}"
    if preemptions := window.rise("preemptions"):
        return f"{preemptions:,.0f} requests were preempted for want of GPU cache"
    if evictions := window.rise("gpu_evictions"):
        return f"at least {evictions:,.0f} blocks were evicted from the GPU cache"
    now, before = _local_share(window), _local_share_before(window, limits)
    if now is not None and before is not None and now < before / 2:
        return f"local hits fell from {before:.0%} to {now:.0%}"
    new = window.rise("local_queries") - window.rise("local_hits")
    room = window.after.gpu_tokens
    if room and new >= _TURNOVER * room and (usage is None or usage >= _HALF_USED):
        return f"{new:,.0f} new tokens passed through a GPU cache of {room:,.0f}"
    return None


def _reuse(window: Window, limits: Thresholds) -> str | None:
    """How it shows that prompts have prefixes in common; None if it does not."""
    now, before = _local_share(window), _local_share_before(window, limits)
    if now is not None and now >= limits.scrape_local_share:
        hits = percent(window.rise("local_hits"), window.rise("local_queries"))
        return f"prefixes do come back ({hits} local hits)"
    if before is not None:
        return f"prefixes did come back before ({before:.1%} local hits)"
    return None


def _local_share(window: Window) -> float | None:
    asked = window.rise("local_queries")
    return window.rise("local_hits") / asked if asked > 0 else None


def _local_share_before(window: Window, limits: Thresholds) -> float | None:
    """Local hits of queries until the window, if that is a share worth speaking of."""
    asked = window.earlier("local_queries")
    if asked < limits.scrape_queries_tokens:
        return None
    share = window.earlier("local_hits") / asked
    return share if share >= 2 * limits.scrape_local_share else None


def _warm(window: Window, limits: Thresholds) -> bool:
    """Whether the tier had something to serve before the window ended."""
    if window.earlier("store_bytes") > 0:
        return True
    if window.before is None and (window.seconds or 0.0) >= limits.scrape_window_seconds:
        return True
    asked = window.rise("external_queries")
    room = window.after.gpu_tokens
    return asked >= _MUCH * limits.scrape_queries_tokens or bool(room and asked >= 3 * room)
