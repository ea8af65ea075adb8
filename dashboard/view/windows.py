"""Which chunks of a group a boundary needs (design, section 5)."""

from __future__ import annotations

from kvlens.telemetry.records import GroupLayout, GroupLookup
from kvlens.telemetry.semconv import GroupKind


def first_needed(query: GroupLookup, layout: GroupLayout | None, local: int, boundary: int) -> int:
    """First chunk of this group that is needed to reuse ``boundary`` tokens.

    ``local`` and ``boundary`` are tokens. Without the layout a window is not known;
    then only the last chunk is claimed, rather than chunks that may not be needed.
    """
    size = query.tokens_per_chunk
    last = max(-(-boundary // size) - 1, 0)
    if query.group_kind == GroupKind.MAMBA:
        return last
    if query.group_kind == GroupKind.SLIDING_WINDOW:
        if layout is None or layout.window is None:
            return last
        return max(local, boundary - layout.window + 1 - layout.extra_retained) // size
    if query.group_kind == GroupKind.CHUNKED_LOCAL:
        if layout is None or not layout.attention_chunk:
            return last
        return max(local, boundary - boundary % layout.attention_chunk) // size
    return local // size
