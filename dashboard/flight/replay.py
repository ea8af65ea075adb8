"""What each search would have served: a lookup done again over what was resident at it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.view.strip import decisive_lookup
from kvlens.telemetry.records import EngineInfo, Lookup, RequestRecord
from kvlens.telemetry.semconv import Exit, Verdict
from kvlens.telemetry.verdict.oracle import Holds, is_servable, servable_boundary
from kvlens.telemetry.verdict.search import search

STOCK: Final = "stock"
CORRECTED: Final = "corrected"
EXACT: Final = "exact"
MODES: Final = (STOCK, CORRECTED, EXACT)
_MOST_TOKENS: Final = 2**24
"""A prompt longer than any model takes: such a record is not real."""


@dataclass(frozen=True)
class ReplayedRequest:
    """One request, by each search; tokens beyond the local ones."""

    record: RequestRecord
    would_serve: Mapping[str, int]
    """By mode."""
    unsafe: bool
    """vLLM's own search would have served a boundary that cannot be served."""
    lower_bound: bool
    """The record lists only a part of what was resident."""

    def saved(self, mode: str) -> int:
        """Tokens that ``mode`` would have served beyond those that were; may be negative."""
        return self.would_serve[mode] - self.record.served_tokens


def replay(record: RequestRecord, engine: EngineInfo) -> ReplayedRequest | None:
    """Do the lookup of ``record`` again, in every mode.

    None where the record does not tell enough: a request that did not read, one
    without a lookup, or one whose resident chunks were not kept.
    """
    lookup = decisive_lookup(record)
    if record.verdict == Verdict.SKIPPED or lookup is None or not _tells_what_was_resident(lookup):
        return None
    holds = _holds(lookup)
    served = {
        mode: max(0, _boundary(mode, engine, lookup, holds) - lookup.local_tokens) for mode in MODES
    }
    boundary = lookup.local_tokens + served[STOCK]
    safe = _is_safe(engine, lookup, holds, boundary)
    if lookup.exit == Exit.PARTIAL_TAIL:  # the end of a partial block is no chunk: not recorded
        served = {mode: max(tokens, record.served_tokens) for mode, tokens in served.items()}
    truncated = any(group.truncated for group in lookup.groups)
    return ReplayedRequest(record, served, unsafe=not safe, lower_bound=truncated)


def _tells_what_was_resident(lookup: Lookup) -> bool:
    if not 0 <= lookup.local_tokens <= lookup.num_tokens <= _MOST_TOKENS:
        return False
    found = any(group.raw_hits for group in lookup.groups)
    return not found or any(group.resident for group in lookup.groups)


def _holds(lookup: Lookup) -> Holds:
    """Which chunks were resident; ranges are searched, never spelled out."""
    ranges = {group.kv_group: sorted(group.resident) for group in lookup.groups}
    firsts = {kv_group: [first for first, _ in found] for kv_group, found in ranges.items()}

    def holds(kv_group: int, chunk: int) -> bool:
        index = bisect_right(firsts.get(kv_group, ()), chunk) - 1
        return index >= 0 and chunk <= ranges[kv_group][index][1]

    return holds


def _boundary(mode: str, engine: EngineInfo, lookup: Lookup, holds: Holds) -> int:
    layout, local, tokens = engine.layout, lookup.local_tokens, lookup.num_tokens
    if mode != EXACT:
        annotated = {group.kv_group for group in layout.groups if group.pop}
        boundary = search(
            layout,
            holds,
            local,
            tokens,
            lookup.cap,
            drafters=_stock_drafters(engine) if mode == STOCK else annotated,
            widen=mode == CORRECTED or _stock_widens(engine),
            load_window=engine.load_window,
            load_cap=lookup.load_cap,
        )
        if mode == STOCK or _is_safe(engine, lookup, holds, boundary):
            return boundary
    return servable_boundary(layout, holds, local, tokens, cap=lookup.cap)


def _is_safe(engine: EngineInfo, lookup: Lookup, holds: Holds, boundary: int) -> bool:
    local = lookup.local_tokens
    return boundary == local or is_servable(
        engine.layout, holds, local, lookup.num_tokens, boundary, lookup.cap
    )


def _active(engine: EngineInfo, correction: str) -> bool:
    return any(item.name == correction and item.state == "active" for item in engine.corrections)


def _stock_drafters(engine: EngineInfo) -> set[int]:
    """Groups that this vLLM pops without corrections."""
    groups = engine.layout.groups
    annotated = any(group.drafter for group in groups)
    if _active(engine, "drafter_fallback") and engine.block_drop and not annotated:
        return {group.kv_group for group in groups}
    return {group.kv_group for group in groups if group.drafter_used}


def _stock_widens(engine: EngineInfo) -> bool:
    """Whether this vLLM asks every drafter group for one chunk more without corrections."""
    return engine.widens and not _active(engine, "pop_widening")
