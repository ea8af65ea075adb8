"""What should not happen at all: stalls, failed transfers, unsafe boundaries, lost telemetry."""

from __future__ import annotations

from typing import Any, Final

from kvlens.dashboard.detect.eligible import number
from kvlens.dashboard.detect.share import RequestWeight, ShareDetector, ShareRule, ShareState
from kvlens.dashboard.detect.tally import Tally
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Cause, Exit, IncidentKind, Severity, Verdict

_DEFERRED: Final = frozenset(
    map(str, (Exit.DEFERRED_BACKEND, Exit.DEFERRED_LOADING, Exit.DEFERRED_TRANSFER))
)
_POSITION: Final = ("kv_group", "boundary", "state_tokens", "chunk", "unwritten_token")
"""Evidence of an unsafe request that says where."""
_NOT_STORED: Final = frozenset(map(str, (Cause.ALLOCATION_FAILURE, Cause.TRANSFER_FAILED)))
_REMEMBERED: Final = 1024
"""Stalled requests remembered, so that each counts once however often it is reported."""


def waited(record: RequestRecord) -> float:
    """Seconds that a request waited for an answer, by its own account or by its lookups'."""
    if record.deferral_seconds:
        return record.deferral_seconds
    deferred = [lookup for lookup in record.lookups if lookup.exit in _DEFERRED]
    if not deferred:
        return 0.0
    first = min(lookup.time for lookup in deferred)
    return max(lookup.last_time or lookup.time for lookup in deferred) - first


class DeferralStall(ShareDetector):
    """A lookup is deferred again and again; seen while the request still waits."""

    kind = IncidentKind.DEFERRAL_STALL

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open: at the first."""
        return ShareRule(thresholds.deferral_stall_window_seconds, 0.0, 1)

    def deferred(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """A request that still waits; shorter waits say nothing yet."""
        if waited(record) <= self._thresholds(engine.model).deferral_stall_seconds:
            return None
        return self.observe(record, engine)

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """One per request that asked the tier."""
        seconds = waited(record)
        if seconds <= thresholds.deferral_stall_seconds:
            return RequestWeight(total=1) if record.lookups else None
        longest = max(state.memory.values(), default=0.0)
        known = state.memory.pop(record.internal_request_id, 0.0)
        state.memory[record.internal_request_id] = max(known, seconds)
        while len(state.memory) > _REMEMBERED:
            del state.memory[next(iter(state.memory))]
        facts = {
            "longest_seconds": round(seconds, 3),
            "deferred_lookups": sum(item.count for item in record.lookups),
        }
        longer = seconds >= longest
        return RequestWeight(1, 1, 0 if known else 1, facts=facts if longer else {})

    def rank(self, tally: Tally, thresholds: Thresholds) -> Severity:
        """Critical once it is more than a single request."""
        many = tally.requests >= thresholds.deferral_stall_requests
        return Severity.CRITICAL if many else Severity.WARNING

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        why = f"; cause: {tally.cause.replace('_', ' ')}" if tally.cause else ""
        return (
            f"{tally.requests:,} {'request' if tally.requests == 1 else 'requests'} waited for an "
            f"answer of the tier, up to {tally.facts['longest_seconds']:,.0f} s{why}"
        )

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {"verdicts": (str(Verdict.STALLED),)}


class StoreFailures(ShareDetector):
    """The tier refuses stores, or they fail; a warning while it still serves."""

    kind = IncidentKind.STORE_FAILURES

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open."""
        return ShareRule(
            thresholds.store_failures_window_seconds,
            thresholds.store_failures_share,
            thresholds.store_failures_count,
        )

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Store decisions, and those of them that came to nothing."""
        if not record.stores and not record.served_tokens:
            return None
        chunks = sum(group.refused for store in record.stores for group in store.groups)
        refused = sum(
            store.refused or any(group.refused for group in store.groups) for store in record.stores
        )
        failed = sum(store.failed for store in record.stores)
        missed = record.cause in _NOT_STORED and not record.served_tokens
        return RequestWeight(
            total=len(record.stores),
            bad=refused + failed,
            hits=refused + failed,
            numbers={
                "stores": len(record.stores),
                "refused_stores": refused,
                "refused_chunks": chunks,
                "failed_stores": failed,
                "loads": sum(not load.failed for load in record.loads),
                "served_tokens": record.served_tokens,
                "requests_lost": int(missed),
            },
        )

    def rank(self, tally: Tally, thresholds: Thresholds) -> Severity:
        """Critical only if nothing is served any more, and something was lost by it."""
        useless = not tally.numbers["served_tokens"]
        lost = tally.numbers["requests_lost"] >= thresholds.zero_hit_requests
        return Severity.CRITICAL if useless and lost else Severity.WARNING

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        loads, failed = tally.numbers["loads"], tally.numbers["failed_stores"]
        return (
            f"The tier refused {tally.numbers['refused_stores']:,.0f} of "
            f"{tally.numbers['stores']:,.0f} stores "
            f"({tally.numbers['refused_chunks']:,.0f} chunks), "
            f"{f'{failed:,.0f} more failed, ' if failed else ''}"
            f"{f'while {loads:,.0f} loads went on' if loads else 'and nothing was loaded'}"
        )

    def next_step(self, tally: Tally) -> str:
        """Advice."""
        return (
            "Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use), or lower the number of "
            "requests at a time: slots that are being read or written cannot be evicted. With a "
            "second tier, look for errors of its backend in the engine's log."
        )


class LoadFailures(ShareDetector):
    """What was found cannot be loaded: requests end, or compute what they were promised."""

    kind = IncidentKind.LOAD_FAILURES

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open: once it repeats."""
        return ShareRule(
            thresholds.load_failures_window_seconds,
            thresholds.load_failures_share,
            thresholds.load_failures_count,
        )

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Loads, and failed ones of them."""
        if not record.loads:
            return None
        failed = sum(load.failed for load in record.loads)
        numbers: dict[str, float] = {
            "loads": len(record.loads),
            "failed_loads": failed,
            "failed_tokens": record.failed_tokens,
            "served_tokens": record.served_tokens,
        }
        return RequestWeight(total=len(record.loads), bad=failed, hits=failed, numbers=numbers)

    def rank(self, tally: Tally, thresholds: Thresholds) -> Severity:
        """Critical only if nothing is served any more."""
        useless = not tally.numbers["served_tokens"]
        many = tally.numbers["failed_loads"] >= thresholds.zero_hit_requests
        return Severity.CRITICAL if useless and many else Severity.WARNING

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        return (
            f"{tally.numbers['failed_loads']:,.0f} of {tally.numbers['loads']:,.0f} loads failed: "
            f"{tally.numbers['failed_tokens']:,.0f} tokens were found and not served"
        )

    def next_step(self, tally: Tally) -> str:
        """Advice."""
        return (
            "Look for 'KV offload load job' in the engine's log, and for errors of the device and "
            "of the tier's backend before it. Requests end with such a load unless "
            "kv_load_failure_policy is recompute."
        )


class UnsafeBoundary(ShareDetector):
    """Wrong KV data was served or stored: outputs may be wrong. Open until the engine ends."""

    kind = IncidentKind.UNSAFE_BOUNDARY
    severity = Severity.CRITICAL

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open: at the first."""
        return ShareRule(thresholds.zero_hit_window_seconds, 0.0, 1, recovers=False)

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Unsafe requests only."""
        if record.verdict != Verdict.UNSAFE:
            return None
        facts = {
            name: value for name in _POSITION
            if (value := number(record.evidence, name)) is not None
        }  # fmt: skip
        return RequestWeight(1, 1, 1, {"served_tokens": record.served_tokens}, facts)

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        one = tally.requests == 1
        requests = f"{tally.requests:,} {'request' if one else 'requests'}"
        if tally.cause == Cause.UNWRITTEN_SLOT:
            return f"{requests} stored a block whose last slot was never written, as if it were"
        return (
            f"{requests} {'was' if one else 'were'} served up to a boundary at which a recurrent "
            f"group has no state: "
            f"{'its output' if one else 'their outputs'} may be wrong"
        )

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {"verdicts": (str(Verdict.UNSAFE),)}


class TelemetryLost(ShareDetector):
    """The engine dropped facts or spans: numbers are lower bounds, causes less sure."""

    kind = IncidentKind.TELEMETRY_LOST

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open: at the first."""
        return ShareRule(thresholds.telemetry_lost_window_seconds, 0.0, 1)

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """The engine's own count of what it dropped, which only rises."""
        known = state.memory.get("dropped", 0.0)
        state.memory["dropped"] = max(known, record.dropped)
        more = record.dropped - known
        if more <= 0:
            return RequestWeight(total=1)
        return RequestWeight(1, 1, 1, {"dropped": more}, {"dropped_since_start": record.dropped})

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        return (
            f"The engine dropped {tally.numbers['dropped']:,.0f} facts or spans: what is shown of "
            f"it is a lower bound"
        )

    def next_step(self, tally: Tally) -> str:
        """Advice."""
        return (
            "Look at kvlens_dropped_facts_total and kvlens_dropped_spans_total: spans are dropped "
            "while the OTLP endpoint is slow or away (bring it up, or lower sample_rate), facts "
            "while the engine's process is starved (raise queue_size)."
        )
