"""From spans to a batch for the store: what is taken, ignored and rejected, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import msgspec

from kvlens.dashboard.ingest.checks import (
    SPAN_ID,
    TRACE_ID,
    check_engine,
    check_length,
    check_record,
    check_time,
)
from kvlens.dashboard.ingest.otlp import MAX_ATTRIBUTES, Resource, Span
from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.engine import EngineEvent
from kvlens.dashboard.store.codec import pack
from kvlens.telemetry import semconv
from kvlens.telemetry.records import (
    EngineInfo,
    RecordError,
    RequestRecord,
    decode_engine,
    decode_record,
    encode,
)

_REASONS: Final = 3
"""Different reasons told in one answer."""
OURS: Final = frozenset({semconv.SPAN_REQUEST, semconv.SPAN_ENGINE, semconv.SPAN_DEFERRAL})
"""Names of the spans that are for us."""
_STATES: Final = (semconv.ENGINE_STARTED, semconv.ENGINE_ALIVE, semconv.ENGINE_STOPPED)


@dataclass
class Accepted:
    """The outcome of one export."""

    batch: Batch
    ignored: int = 0
    """Spans that are not for us."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Spans of ours that cannot be taken, by reason."""

    @property
    def message(self) -> str:
        """Why spans were rejected, for the sender's log."""
        told = [f"{reason} ({count}x)" for reason, count in self.rejected.most_common(_REASONS)]
        more = len(self.rejected) - len(told)
        return "; ".join(told) + (f"; and {more} other reasons" if more > 0 else "")


def accept(resources: Sequence[Resource], max_json: int) -> Accepted:
    """Sort the spans of one export; ``max_json`` limits a JSON attribute in bytes."""
    engines: list[tuple[EngineInfo, float]] = []
    events: list[EngineEvent] = []
    rows: list[RecordRow] = []
    deferrals: list[RequestRecord] = []
    accepted = Accepted(Batch(engines, events, rows, deferrals=deferrals))
    for resource in resources:
        ours = [span for span in resource.spans if span.name in OURS]
        accepted.ignored += len(resource.spans) - len(ours)
        if not ours:
            continue
        if resource.too_many:
            accepted.rejected[_too_many("the resource")] += len(ours)
            continue
        try:
            engine = _engine(resource, max_json)
        except RecordError as error:
            accepted.rejected[str(error)] += len(ours)
            continue
        newest = engine.started_at
        for span in ours:
            try:
                if span.too_many:
                    raise RecordError(_too_many(span.name))
                if span.name == semconv.SPAN_REQUEST:
                    row = _row(span, engine, max_json)
                    rows.append(row)
                    newest = max(newest, row.record.finish_time)
                    continue
                at = check_time(span.end_time, f"end time of {span.name}")
                if span.name == semconv.SPAN_ENGINE:
                    events.append(_event(span, engine))
                    if events[-1].state == semconv.ENGINE_ALIVE:
                        continue  # it does nothing: it stays as idle as it was
                newest = max(newest, at)
                if span.name == semconv.SPAN_DEFERRAL and semconv.ATTR_RECORD in span.attributes:
                    deferrals.append(_row(span, engine, max_json).record)
            except RecordError as error:
                accepted.rejected[str(error)] += 1
        engines.append((engine, newest))
    return accepted


def _too_many(what: str) -> str:
    return f"{what} has over {MAX_ATTRIBUTES} attributes"


def _engine(resource: Resource, max_json: int) -> EngineInfo:
    text = resource.attributes.get(semconv.ATTR_ENGINE)
    if text is None:
        raise RecordError(
            f"the resource has no attribute {semconv.ATTR_ENGINE}: keep resource attributes in "
            "the collector's pipeline"
        )
    check_length(text, semconv.ATTR_ENGINE, max_json)
    return _checked_engine(text)


@lru_cache(maxsize=512)
def _checked_engine(text: str) -> EngineInfo:
    """Every export repeats this text, so it is read once."""
    engine = decode_engine(text)
    check_engine(engine)
    return engine


def _event(span: Span, engine: EngineInfo) -> EngineEvent:
    state = span.attributes.get(semconv.ATTR_ENGINE_STATE, "")
    if state not in _STATES:
        raise RecordError(
            f"{semconv.ATTR_ENGINE_STATE} is {state[:40]!r}, not one of {', '.join(_STATES)}"
        )
    return EngineEvent(engine.incarnation_id, state, span.end_time)


def _row(span: Span, engine: EngineInfo, max_json: int) -> RecordRow:
    text = span.attributes.get(semconv.ATTR_RECORD)
    if text is None:
        raise RecordError(f"{span.name} has no attribute {semconv.ATTR_RECORD}")
    check_length(text, semconv.ATTR_RECORD, max_json)
    try:
        record = decode_record(text)
    except RecursionError as error:
        raise RecordError(f"{semconv.ATTR_RECORD} is nested too deeply") from error
    check_record(record, engine)
    if not record.trace_id and TRACE_ID.match(span.trace_id):
        span_id = span.span_id if SPAN_ID.match(span.span_id) else ""
        record = msgspec.structs.replace(record, trace_id=span.trace_id, span_id=span_id)
        text = encode(record)
    return RecordRow(record, pack(text))
