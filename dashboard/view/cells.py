"""From the queries of one group to its runs of chunks in equal state.

Interval arithmetic: the cost depends on how many ranges a lookup names, never on how
many chunks a prompt has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from kvlens.dashboard.view.windows import first_needed
from kvlens.telemetry.records import GroupLayout, GroupLookup, Lookup

ChunkSpan = tuple[int, int]
"""Half-open range of chunk indexes."""


class CellState(str, Enum):
    """State of one chunk, strongest first: the first that applies is shown."""

    LOCAL = "local"
    SERVED = "served"
    POPPED = "popped"
    HIT = "hit"
    RESIDENT = "resident"
    UNKNOWN = "unknown"
    MISSING = "missing"
    UNASKED = "unasked"


@dataclass(frozen=True)
class Run:
    """Neighbouring chunks of one state; ``last`` is inclusive, tokens are half-open."""

    state: CellState
    first: int
    last: int
    start_token: int
    end_token: int

    @property
    def count(self) -> int:
        """Chunks in the run."""
        return self.last - self.first + 1


def runs(
    queries: Sequence[GroupLookup],
    asked: Sequence[GroupLookup],
    layout: GroupLayout | None,
    lookup: Lookup,
    tokens: int,
) -> Iterable[Run]:
    """Yield the runs that tile a prompt of ``tokens`` tokens.

    ``queries`` are all entries of one group in ``lookup``, ``asked`` those that ran.
    """
    size = queries[0].tokens_per_chunk
    chunks = -(-tokens // size)
    resident = [(first, last + 1) for query in queries for first, last in query.resident]
    layers: dict[CellState, list[ChunkSpan]] = {
        CellState.LOCAL: [(0, lookup.local_tokens // size)],
        CellState.SERVED: [_served(query, layout, lookup) for query in queries],
        CellState.POPPED: [_popped(query) for query in asked],
        CellState.HIT: [_hits(query, layout, lookup.local_tokens) for query in asked],
        CellState.RESIDENT: resident,
        CellState.UNKNOWN: [],
        CellState.MISSING: [_scanned(query, layout, lookup.local_tokens) for query in asked],
    }
    if any(query.truncated for query in queries):
        layers[CellState.UNKNOWN] = [(max((end for _, end in resident), default=0), chunks)]
    edges = sorted({0, chunks}.union(*(_edges(spans, chunks) for spans in layers.values())))
    states = [CellState.UNASKED] * (len(edges) - 1)
    for state, spans in reversed(layers.items()):
        for start, end in _merged(spans, chunks):
            first, last = bisect_left(edges, start), bisect_left(edges, end)
            states[first:last] = [state] * (last - first)
    position = 0
    for state, same in groupby(states):
        first, position = edges[position], position + len(list(same))
        end = edges[position]
        yield Run(state, first, end - 1, first * size, min(end * size, tokens))


def _edges(spans: Iterable[ChunkSpan], chunks: int) -> Iterable[int]:
    return (edge for span in spans for edge in span if 0 < edge < chunks)


def _merged(spans: Iterable[ChunkSpan], chunks: int) -> Iterable[ChunkSpan]:
    """Within the prompt, in order, without overlap: painting them costs each edge once."""
    reached = 0
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, chunks)
        if start < end:
            yield start, end
            reached = end


def _hit_end(query: GroupLookup) -> int:
    return query.start_chunk + (query.raw_hits or 0)


def _popped(query: GroupLookup) -> ChunkSpan:
    return _hit_end(query) - query.popped, _hit_end(query)


def _hits(query: GroupLookup, layout: GroupLayout | None, local: int) -> ChunkSpan:
    """Chunks that a query found: a prefix, or only the window that it was looking for."""
    if not query.raw_hits:
        return 0, 0
    boundary = (_hit_end(query) - query.popped) * query.tokens_per_chunk
    needed = first_needed(query, layout, local, boundary)
    return max(query.start_chunk, needed), _hit_end(query)


def _scanned(query: GroupLookup, layout: GroupLayout | None, local: int) -> ChunkSpan:
    """Chunks whose absence a query established."""
    start, _ = _hits(query, layout, local)
    return max(start, query.start_chunk), query.start_chunk + query.width


def _served(query: GroupLookup, layout: GroupLayout | None, lookup: Lookup) -> ChunkSpan:
    if not lookup.result:
        return 0, 0
    if query.state_chunk is not None:
        return query.state_chunk, query.state_chunk + 1
    boundary = lookup.local_tokens + lookup.result
    start = first_needed(query, layout, lookup.local_tokens, boundary)
    return start, -(-boundary // query.tokens_per_chunk)
