"""The curve of an engine and a window of time, from the records in the store."""

from __future__ import annotations

from typing import Final

import msgspec

from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.sizing.report import Sized
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.records import Layout
from kvlens.telemetry.sizing.formats import FieldError
from kvlens.telemetry.sizing.measure import Question, measure
from kvlens.telemetry.sizing.memory import Memory
from kvlens.telemetry.sizing.recorded import Records
from kvlens.telemetry.sizing.trace import TraceRequest

MAX_REQUESTS: Final = 20_000
"""The newest so many of a window are read."""
_PAGE: Final = 1_000


def sized(
    store: Store, engine: Engine, since: float, until: float, question: Question
) -> Sized | None:
    """Size what finished in a window (Unix seconds); None if no request names its blocks."""
    records = Records()
    found: list[TraceRequest] = []
    weighted = 0
    query = RequestQuery(engine=engine.info.incarnation_id, since=since, until=until, limit=_PAGE)
    read, more = 0, True
    while more and read < MAX_REQUESTS:
        page = store.requests(query)
        read += len(page.records)
        for record in page.records:
            weighted += record.sampling_probability < 1
            try:
                request = records.request(record)
            except FieldError:
                records.left_out += 1
                continue
            if request is not None:
                found.append(request)
        more = page.next_cursor is not None
        query = msgspec.structs.replace(query, cursor=page.next_cursor)
    if not found:
        return None
    layout = engine.info.layout
    memory = Memory(chunks_per_token=chunks_per_token(layout))
    said = measure(reversed(found), lambda: records.block_tokens, question)
    capacity = engine.info.capacity_chunks
    per_block = (memory.chunks_per_token or 0) * records.block_tokens
    return Sized(
        name=engine.info.engine_id,
        format="records",
        chained_here=False,
        notes=tuple(_notes(read, more, weighted, records.left_out)),
        said=said,
        memory=memory,
        now=int(capacity / per_block) if capacity and per_block else None,
    )


def chunks_per_token(layout: Layout) -> float:
    """Slots that a token takes if every chunk of every group is kept."""
    return sum(1 / group.tokens_per_chunk for group in layout.groups if group.tokens_per_chunk)


def _notes(read: int, more: bool, weighted: int, left_out: int) -> list[str]:
    notes = []
    if more:
        notes.append(f"Only the newest {read:,} requests of this range were read.")
    if weighted:
        notes.append(
            f"{weighted:,} requests are samples of more: reuse looks rarer than it was "
            f"(sample_rate: 1.0 sends all)."
        )
    if left_out:
        notes.append(f"{left_out:,} requests name no block: shorter than one, or recorded before.")
    return notes
