"""Which requests the offload tier owed something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvlens.dashboard.detect.tally import Item
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.telemetry.records import EngineInfo, Layout, RequestRecord
from kvlens.telemetry.semconv import Exit, Verdict

MAX_NUMBER: Final = 2**53
"""No number of a request is larger; one that is cannot be kept."""
_NOTHING_DUE: Final = frozenset(
    map(str, (Verdict.SKIPPED, Verdict.LOCAL, Verdict.COLD, Verdict.EVICTED))
)
"""Verdicts that say that nothing was there to be served."""
_NOT_OURS: Final = frozenset(map(str, (Exit.OTHER_CONNECTOR, Exit.NOT_ADMITTED, Exit.SKIPPED)))
"""Ends of a last lookup after which serving nothing says nothing about the tier."""
_LOSING: Final = frozenset(
    map(str, (Verdict.PARTIAL, Verdict.LOST, Verdict.UNSTORED, Verdict.STALLED))
)
"""Verdicts with which lost tokens are a finding; with others they are a remainder."""
_ENGINES: Final = 10_000
_largest: Final[dict[str, tuple[Layout, int]]] = {}
"""Largest chunk of an incarnation's layout."""


def least_tokens(engine: EngineInfo, thresholds: Thresholds) -> int:
    """Expected tokens from which a request is eligible: below a chunk nothing is served."""
    # Engines come as the same object again and again, and each detector asks for each request.
    layout, largest = _largest.get(engine.incarnation_id, (None, 0))
    if layout is not engine.layout:
        if len(_largest) >= _ENGINES:
            _largest.clear()
        largest = engine.layout.largest_chunk
        _largest[engine.incarnation_id] = engine.layout, largest
    return max(largest, thresholds.eligible_min_tokens)


def due(record: RequestRecord, min_tokens: int) -> bool:
    """Whether the tier should have served at least ``min_tokens`` of this request."""
    if record.expected_tokens < min_tokens or record.verdict in _NOTHING_DUE:
        return False
    return not record.lookups or record.lookups[-1].exit not in _NOT_OURS


def number(evidence: Mapping[str, Any], name: str) -> int | None:
    """A whole number of the evidence, which comes from outside; None if there is none."""
    value = evidence.get(name)
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return value if usable else None


def lost(record: RequestRecord | Item) -> int:
    """Tokens lost as a finding, not as a remainder below a chunk (N9)."""
    return record.lost_tokens if record.verdict in _LOSING else 0
