"""The chunk strip: what became of every chunk of every group in one lookup.

Pure derivation from a record, no markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlens.dashboard.view.cells import CellState, Run, runs
from kvlens.telemetry.records import GroupLayout, GroupLookup, Layout, Lookup, RequestRecord
from kvlens.telemetry.semconv import DEFERRED_EXITS, Depth, Exit


@dataclass(frozen=True)
class StripRow:
    """One KV-cache group on the strip; counts are chunks of this group."""

    kv_group: int
    kind: str
    tokens_per_chunk: int
    window: int | None
    drafter: bool
    """Treated as a drafter group by this lookup."""
    annotated: bool | None
    """Annotated as holding drafter layers; None when the layout is not known."""
    chunks: int
    """Chunks that the prompt spans, an incomplete last one included."""
    runs: tuple[Run, ...]
    asked: bool
    width: int
    raw_hits: int | None
    popped: int
    boundary: int
    veto: str
    """Why this group brought the lookup to its result; empty for the others."""
    truncated: bool

    def count(self, state: CellState) -> int:
        """Chunks in ``state``."""
        return sum(run.count for run in self.runs if run.state is state)


@dataclass(frozen=True)
class Strip:
    """All rows of one lookup on one token axis; boundaries are tokens from the start."""

    tokens: int
    local: int
    answered: int
    servable: int
    expected: int
    rows: tuple[StripRow, ...]
    lookup: Lookup


def decisive_lookup(record: RequestRecord) -> Lookup | None:
    """The lookup that the request's totals come from.

    The first one that was answered and admitted: lookups after a preemption do not
    count. Where none was, the last one tells most.
    """
    final = [
        lookup
        for lookup in record.lookups
        if lookup.exit not in DEFERRED_EXITS and lookup.exit != Exit.NOT_ADMITTED
    ]
    if record.served_tokens:
        final = [lookup for lookup in final if lookup.result] or final
    return final[0] if final else (record.lookups[-1] if record.lookups else None)


def build_strip(
    record: RequestRecord, layout: Layout | None = None, lookup: Lookup | None = None
) -> Strip | None:
    """The strip of ``lookup`` (default: the decisive one), None if nothing was looked up.

    ``layout`` adds what a lookup does not carry: windows and drafter annotations.
    """
    lookup = lookup or decisive_lookup(record)
    if lookup is None or record.depth == Depth.INTERFACE:
        return None
    known = layout.by_group() if layout else {}
    queries = _by_group(lookup.groups)
    for group in known.keys() - queries.keys():
        queries[group] = [_never_asked(known[group])]
    local = lookup.local_tokens
    tokens = max(lookup.num_tokens, record.prompt_tokens, local, 1)
    vetoing = record.vetoing_group if lookup.vetoing_group is None else lookup.vetoing_group
    rows = tuple(
        _row(queries[group], known.get(group), lookup, tokens, veto=group == vetoing)
        for group in sorted(queries)
    )
    if not rows:
        return None
    return Strip(
        tokens=tokens,
        local=local,
        answered=local + (lookup.result or 0),
        servable=min(local + record.servable_tokens, tokens),
        expected=min(local + record.expected_tokens, tokens),
        rows=rows,
        lookup=lookup,
    )


def _by_group(queries: Iterable[GroupLookup]) -> dict[int, list[GroupLookup]]:
    groups: dict[int, list[GroupLookup]] = {}
    for query in queries:
        if query.tokens_per_chunk > 0:  # a record comes from outside
            groups.setdefault(query.kv_group, []).append(query)
    return groups


def _never_asked(layout: GroupLayout) -> GroupLookup:
    """A group that the lookup ended before; its row says so."""
    return GroupLookup(
        kv_group=layout.kv_group,
        group_kind=layout.group_kind,
        tokens_per_chunk=layout.tokens_per_chunk,
        drafter=layout.drafter_used,
    )


def _row(
    queries: Sequence[GroupLookup],
    layout: GroupLayout | None,
    lookup: Lookup,
    tokens: int,
    *,
    veto: bool,
) -> StripRow:
    # A group queried in several passes: every pass adds cells, the last one has the numbers.
    asked = [query for query in queries if query.pass_number > 0]
    last = (asked or queries)[-1]
    return StripRow(
        kv_group=last.kv_group,
        kind=last.group_kind,
        tokens_per_chunk=last.tokens_per_chunk,
        window=layout.window if layout else None,
        drafter=any(query.drafter for query in queries),
        annotated=layout.drafter if layout else None,
        chunks=-(-tokens // last.tokens_per_chunk),
        runs=tuple(runs(queries, asked, layout, lookup, tokens)),
        asked=bool(asked),
        width=last.width,
        raw_hits=last.raw_hits,
        popped=last.popped,
        boundary=last.boundary,
        veto=_veto_label(last, bool(lookup.result)) if veto else "",
        truncated=any(query.truncated for query in queries),
    )


def _veto_label(query: GroupLookup, served: bool) -> str:
    what = "limited here" if served else "vetoed here"
    if not query.pass_number:
        return f"{what}: never asked"
    if query.raw_hits is None:
        return f"{what}: answer deferred"
    if query.popped:
        left = query.raw_hits - query.popped
        return f"{what}: raw hits {query.raw_hits:,}, after pop {left:,}"
    return f"{what}: raw hits {query.raw_hits:,} of {query.width:,} asked"
