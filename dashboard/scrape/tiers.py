"""What vLLM's tiers and lookups show: promotions without room, requests held back."""

from __future__ import annotations

from typing import Any, Final

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import signs
from kvlens.dashboard.scrape.findings import Finding
from kvlens.dashboard.scrape.window import Window
from kvlens.telemetry.semconv import Cause, Confidence, IncidentKind, Severity, Verdict

DEFERRED: Final = "deferred"
"""vLLM's reason for requests that wait for a KV transfer, a LoRA slot or the like."""
_LOOKUPS: Final = 1000
"""Chunk lookups without a load from which a deferred request is taken to retry for good.

The reported stalls made 36,137 and 1.27 M of them.
"""


def no_room_to_promote(window: Window, limits: Thresholds) -> Finding | None:
    """A second tier has what is asked for, but the first one has no room to bring it up (F30)."""
    failed = window.rise("promotion_allocation_failures")
    if not failed or signs.hits(window) or signs.loads(window):
        return None
    if failed < limits.capacity_thrash_requests and not window.rise("tier_hits"):
        return None
    if window.seconds is not None and window.seconds < 0.9 * limits.scrape_window_seconds:
        return None  # a burst: the next request may well be served
    asked, given = window.rise("tier_queries"), window.rise("tier_hits")
    had = f"{given:,.0f} chunks were found in the tiers below, but " if given else ""
    return Finding(
        kind=str(IncidentKind.CAPACITY_THRASH),
        severity=Severity.WARNING,
        confidence=Confidence.CERTAIN,
        status=str(Verdict.EVICTED),
        cause=str(Cause.CAPACITY),
        summary=f"{had}{failed:,.0f} promotions found no room in the first tier, and nothing was "
        f"served",
        evidence={
            "promotion_allocation_failures": int(failed),
            "promotion_failures": int(window.rise("promotion_failures")),
            "tier_hits": int(given),
            "tier_queries": int(asked),
            "external_hits": 0,
            "load_bytes": 0,
        },
        next_step="Enlarge the first tier (cpu_bytes_to_use, or --kv-offloading-size): a prompt "
        "is served only if all of it fits there at once, whatever the tiers below hold.",
    )


def held_back(window: Window, limits: Thresholds) -> float:
    """Requests deferred at both ends of a window in which the tier was asked without end (F11)."""
    before, after = window.before, window.after
    long = window.seconds is not None and window.seconds >= limits.deferral_stall_seconds
    if before is None or window.restarted or not long or signs.loads(window):
        return 0.0
    if window.rise("tier_queries") < _LOOKUPS and window.rise("lookups") < _LOOKUPS:
        return 0.0
    if window.rise("requests"):  # others finish: the queue moves
        return 0.0
    return min(before.waiting.get(DEFERRED, 0.0), after.waiting.get(DEFERRED, 0.0))


def lookups(window: Window) -> dict[str, Any]:
    """How lookups went, as far as the page tells; for evidence."""
    facts: dict[str, Any] = {}
    if count := window.rise("lookups"):
        facts["lookups"] = int(count)
        facts["mean_lookup_seconds"] = round(window.rise("lookup_seconds") / count, 6)
    for name in ("deferred_lookups", "tier_queries", "tier_hits"):
        if window.has(name):
            facts[name] = int(window.rise(name))
    if window.after.waiting:
        facts["requests_deferred"] = int(window.after.waiting.get(DEFERRED, 0.0))
    return facts
