"""Requests that got less than they should: ``lost_hits``, ``store_gaps``, ``capacity_thrash``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

from kvlens.dashboard.detect.eligible import MAX_NUMBER, due, least_tokens, lost, number
from kvlens.dashboard.detect.share import RequestWeight, ShareDetector, ShareRule, ShareState
from kvlens.dashboard.detect.tally import Item, Tally, item_of
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import Cause, IncidentKind, Verdict

_LISTED: Final = 16
"""Gaps listed in evidence, at most."""
_LONGEST_RUN: Final = 256
"""Requests kept of a run; a longer one is an incident of its own."""


class LostHits(ShareDetector):
    """More than a tenth of the expected tokens is recomputed.

    The newest run of requests that were served nothing is left to ``zero_hit``:
    it counts here once a request after it was served, unless it had grown into
    an incident of that kind.
    """

    kind = IncidentKind.LOST_HITS

    def __init__(
        self,
        thresholds: ThresholdsFor = defaults,
        taken: Callable[[str], bool] = lambda incarnation_id: False,
    ) -> None:
        """``taken`` tells whether a ``zero_hit`` of an incarnation is open."""
        super().__init__(thresholds)
        self._taken = taken

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        if record.served_tokens:
            self._count_run(record, engine)
            return super().observe(record, engine)
        thresholds = self._thresholds(engine.model)
        if due(record, least_tokens(engine, thresholds)):
            state = self._touch(record.incarnation_id)
            if state is None:
                state = ShareState(engine.engine_id, engine.model)
                self._states[record.incarnation_id] = state
            state.held.append(item_of(record))
            del state.held[:-_LONGEST_RUN]
        return None

    def _count_run(self, record: RequestRecord, engine: EngineInfo) -> None:
        state = self._states.get(record.incarnation_id)
        if state is None or not state.held:
            return
        rule = self.rule(self._thresholds(engine.model))
        held, state.held = state.held, []
        if not self._taken(record.incarnation_id):
            for item in held:
                state.newest = max(state.newest, item.finish_time)
                self._add(item, _lost_weight(item, 0), state, rule)

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open."""
        return ShareRule(
            thresholds.lost_hits_window_seconds,
            thresholds.lost_hits_share,
            thresholds.lost_hits_requests,
        )

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Expected tokens, and lost ones of them."""
        state.min_tokens = least_tokens(engine, thresholds)
        if not due(record, state.min_tokens):
            return None
        return _lost_weight(record, record.served_tokens)

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        missing, expected = tally.numbers["lost_tokens"], tally.numbers["expected_tokens"]
        why = f"; cause: {tally.cause.replace('_', ' ')}" if tally.cause else ""
        return (
            f"{tally.requests:,} of {tally.numbers['requests']:,.0f} requests lost {missing:,.0f} "
            f"of {expected:,.0f} tokens ({missing / expected:.0%}) that offloading should have "
            f"served{why}"
        )

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {"min_expected_tokens": state.min_tokens, "min_lost_tokens": 1}


def _lost_weight(record: RequestRecord | Item, served: int) -> RequestWeight:
    missing = lost(record)
    return RequestWeight(
        total=record.expected_tokens,
        bad=missing,
        hits=1 if missing else 0,
        numbers={
            "requests": 1,
            "expected_tokens": record.expected_tokens,
            "served_tokens": served,
            "lost_tokens": missing,
        },
    )


class StoreGaps(ShareDetector):
    """Chunks are missing in the middle of what is stored; all behind them is out of reach."""

    kind = IncidentKind.STORE_GAPS

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open: gaps are proof in themselves, so that any share will do."""
        return ShareRule(thresholds.store_gaps_window_seconds, 0.0, thresholds.store_gaps_chunks)

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Lost tokens, and the gaps that the request met."""
        if not due(record, least_tokens(engine, thresholds)):
            return None
        if Cause.STORE_GAP not in record.causes and record.cause != Cause.STORE_GAP:
            return RequestWeight(total=record.expected_tokens)
        gaps = max(1, number(record.evidence, "gaps") or 1)
        return RequestWeight(
            total=record.expected_tokens,
            bad=max(1, record.lost_tokens),
            hits=gaps,
            numbers={"gaps": gaps, "lost_tokens": record.lost_tokens},
            facts=_gap_facts(record.evidence),
        )

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        first, distance = tally.facts.get("first_gap_chunk"), tally.facts.get("gap_distance")
        where = "" if first is None else f", the first at chunk {first:,}"
        every = "" if distance is None else f", every {distance:,} chunks"
        group = tally.facts.get("kv_group")
        of = "" if group is None else f" of group {group}"
        return (
            f"{tally.requests:,} {'request' if tally.requests == 1 else 'requests'} stopped at "
            f"gaps in the stored chunks{of}{where}{every}: "
            f"{tally.lost:,} tokens stored behind them were computed again"
        )

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {"cause": str(Cause.STORE_GAP)}


class CapacityThrash(ShareDetector):
    """The tier evicts what is asked for again: it is too small for its traffic."""

    kind = IncidentKind.CAPACITY_THRASH

    def rule(self, thresholds: Thresholds) -> ShareRule:
        """When to open."""
        return ShareRule(
            thresholds.capacity_thrash_window_seconds,
            thresholds.capacity_thrash_share,
            thresholds.capacity_thrash_requests,
        )

    def weight_of(
        self, record: RequestRecord, engine: EngineInfo, state: ShareState, thresholds: Thresholds
    ) -> RequestWeight | None:
        """Tokens that were used again, and those of them that capacity had evicted."""
        gone = _evicted_tokens(record)
        reused = gone + record.served_tokens
        if reused < least_tokens(engine, thresholds):
            return None
        numbers: dict[str, float] = {"served_tokens": record.served_tokens}
        if gone < engine.layout.largest_chunk:
            return RequestWeight(total=reused, numbers=numbers)
        slots = number(record.evidence, "slots_needed")
        capacity = engine.capacity_chunks
        hits = 1.0
        if slots and capacity and slots >= thresholds.capacity_thrash_prompt_share * capacity:
            hits = thresholds.capacity_thrash_requests  # no traffic fits such a tier
        facts = {"slots_needed": slots, "capacity_chunks": capacity}
        return RequestWeight(
            total=reused,
            bad=gone,
            hits=hits,
            numbers=numbers | {"evicted_tokens": gone},
            facts={name: value for name, value in facts.items() if value is not None},
        )

    def summary(self, tally: Tally) -> str:
        """One sentence with the numbers."""
        gone = tally.numbers["evicted_tokens"]
        reused = gone + tally.numbers["served_tokens"]
        slots, capacity = tally.facts.get("slots_needed"), tally.facts.get("capacity_chunks")
        size = f"; one prompt takes {slots:,} of {capacity:,} slots" if slots and capacity else ""
        return (
            f"{gone:,.0f} of {reused:,.0f} reused tokens ({gone / reused:.0%}) were computed "
            f"again, since the tier had no room to keep them{size}"
        )

    def scope(self, state: ShareState) -> dict[str, Any]:
        """Filter for the affected requests."""
        return {"cause": str(Cause.CAPACITY)}


def _evicted_tokens(record: RequestRecord) -> int:
    if record.evicted_tokens:
        return record.evicted_tokens
    if record.cause != Cause.CAPACITY and record.verdict != Verdict.EVICTED:
        return 0
    told = number(record.evidence, "evicted_tokens") or record.lost_tokens
    if told or record.verdict != Verdict.EVICTED:
        return told
    # An older record does not say how many: at most what was computed.
    return max(0, record.prompt_tokens - record.local_tokens - record.served_tokens)


def _gap_facts(evidence: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: value
        for name in ("kv_group", "first_gap_chunk", "tokens_per_chunk")
        if (value := number(evidence, name)) is not None
    }
    listed = evidence.get("gap_chunks")
    if isinstance(listed, list):
        gaps = [gap for gap in listed[:_LISTED] if isinstance(gap, int) and 0 <= gap < MAX_NUMBER]
        apart = {after - before for before, after in pairwise(gaps)}
        facts["gap_chunks"] = gaps
        if len(apart) == 1 and len(gaps) > 2:
            facts["gap_distance"] = apart.pop()
    return facts
