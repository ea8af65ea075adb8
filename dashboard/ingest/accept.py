"""From spans to a batch for the store: what is taken, ignored and rejected, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import msgspec

from kvlens.dashboard.ingest.otlp import Resource, Span
from kvlens.dashboard.store.base import Batch, EngineEvent, Row
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

MAX_STRING: Final = 512
"""Characters of an id, a name or a model."""
_MAX_INT: Final = 2**53
_MAX_GROUPS: Final = 4096
_MAX_DEPTH: Final = 8
_LATEST: Final = 1e11
"""Unix seconds no clock shows: a time in another unit."""
_REASONS: Final = 3
"""Different reasons told in one answer."""
_VERDICTS: Final = frozenset(map(str, semconv.Verdict))
_CAUSES: Final = frozenset(map(str, semconv.Cause))
_OURS: Final = frozenset({semconv.SPAN_REQUEST, semconv.SPAN_ENGINE, semconv.SPAN_DEFERRAL})
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
_SPAN_ID: Final = re.compile(r"[0-9a-f]{16}\Z")


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
    rows: list[Row] = []
    accepted = Accepted(Batch(engines, events, rows))
    for resource in resources:
        ours = [span for span in resource.spans if span.name in _OURS]
        accepted.ignored += len(resource.spans) - len(ours)
        if not ours:
            continue
        try:
            engine = _engine(resource, max_json)
        except RecordError as error:
            accepted.rejected[str(error)] += len(ours)
            continue
        newest = engine.started_at
        for span in ours:
            try:
                if span.name == semconv.SPAN_REQUEST:
                    row = _row(span, engine, max_json)
                    rows.append(row)
                    newest = max(newest, row.record.finish_time)
                    continue
                newest = max(newest, _time(span.end_time, f"end time of {span.name}"))
                if span.name == semconv.SPAN_ENGINE:
                    events.append(_event(span, engine))
            except RecordError as error:
                accepted.rejected[str(error)] += 1
        engines.append((engine, newest))
    return accepted


def _engine(resource: Resource, max_json: int) -> EngineInfo:
    text = resource.attributes.get(semconv.ATTR_ENGINE)
    if text is None:
        raise RecordError(
            f"the resource has no attribute {semconv.ATTR_ENGINE}: keep resource attributes in "
            "the collector's pipeline"
        )
    _short(text, semconv.ATTR_ENGINE, max_json)
    return _checked_engine(text)


@lru_cache(maxsize=512)
def _checked_engine(text: str) -> EngineInfo:
    """Every export repeats this text, so it is read once."""
    engine = decode_engine(text)
    _names(engine, ("engine_id", "incarnation_id", "model"))
    _numbers(engine, ("dp_rank",))
    _short(engine.host, "host", MAX_STRING)
    _time(engine.started_at, "started_at")
    if not engine.layout.groups or any(g.tokens_per_chunk < 1 for g in engine.layout.groups):
        raise RecordError("layout has no groups, or one with tokens_per_chunk below 1")
    return engine


def _event(span: Span, engine: EngineInfo) -> EngineEvent:
    state = span.attributes.get(semconv.ATTR_ENGINE_STATE, "")
    if state not in (semconv.ENGINE_STARTED, semconv.ENGINE_STOPPED):
        raise RecordError(
            f"{semconv.ATTR_ENGINE_STATE} is {state[:40]!r}, not {semconv.ENGINE_STARTED} or "
            f"{semconv.ENGINE_STOPPED}"
        )
    return EngineEvent(engine.incarnation_id, state, span.end_time)


def _row(span: Span, engine: EngineInfo, max_json: int) -> Row:
    text = span.attributes.get(semconv.ATTR_RECORD)
    if text is None:
        raise RecordError(f"{span.name} has no attribute {semconv.ATTR_RECORD}")
    _short(text, semconv.ATTR_RECORD, max_json)
    try:
        record = decode_record(text)
    except RecursionError as error:
        raise RecordError(f"{semconv.ATTR_RECORD} is nested too deeply") from error
    _check(record, engine)
    if not record.trace_id and _TRACE_ID.match(span.trace_id):
        record = msgspec.structs.replace(record, trace_id=span.trace_id, span_id=span.span_id)
        text = encode(record)
    return Row(record, pack(text))


def _check(record: RequestRecord, engine: EngineInfo) -> None:
    _names(record, ("request_id", "internal_request_id", "engine_id", "model"))
    if record.incarnation_id != engine.incarnation_id:
        raise RecordError(
            f"incarnation_id {record.incarnation_id[:40]!r} is not the resource's "
            f"{engine.incarnation_id!r}"
        )
    _known(record.verdict, "verdict", _VERDICTS)
    for cause in filter(None, (record.cause, *record.causes)):
        _known(cause, "cause", _CAUSES)
    _time(record.arrival_time, "arrival_time")
    _time(record.finish_time, "finish_time")
    _numbers(record, _TOKENS)
    if record.vetoing_group is not None and not 0 <= record.vetoing_group < _MAX_GROUPS:
        raise RecordError("vetoing_group is not a group index")
    if not _shallow(record.evidence, _MAX_DEPTH):
        raise RecordError("evidence is nested too deeply")
    if not 0 < record.sampling_probability <= 1:
        raise RecordError("sampling_probability is not above 0 and at most 1")
    for load in record.loads:
        if load.latency is not None and not 0 <= load.latency < _LATEST:
            raise RecordError("latency of a load is negative or not in seconds")
    for name, pattern in (("trace_id", _TRACE_ID), ("span_id", _SPAN_ID)):
        value = getattr(record, name)
        if value and not pattern.match(value):
            raise RecordError(f"{name} {value[:40]!r} is not lower-case hex")


_TOKENS: Final = (
    "prompt_tokens", "local_tokens", "served_tokens", "servable_tokens", "expected_tokens",
    "lost_tokens", "output_tokens",
)  # fmt: skip


def _names(value: RequestRecord | EngineInfo, fields: Sequence[str]) -> None:
    for name in fields:
        text = getattr(value, name)
        if not text:
            raise RecordError(f"{name} is empty")
        _short(text, name, MAX_STRING)


def _numbers(value: RequestRecord | EngineInfo, fields: Sequence[str]) -> None:
    for name in fields:
        if not 0 <= getattr(value, name) < _MAX_INT:
            raise RecordError(f"{name} is negative or absurdly large")


def _short(text: str, name: str, limit: int) -> None:
    if len(text) > limit:
        raise RecordError(f"{name} is longer than {limit:,} characters")


def _time(value: float, name: str) -> float:
    if not 0 < value < _LATEST:
        raise RecordError(f"{name} is not a time in Unix seconds")
    return value


def _shallow(value: object, depth: int) -> bool:
    """Whether ``value`` can be written again wherever it was read."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return depth > 0 and all(_shallow(item, depth - 1) for item in value)


def _known(value: str, name: str, known: frozenset[str]) -> None:
    if value not in known:
        raise RecordError(
            f"{name} {value[:40]!r} is not known here ({', '.join(sorted(known))}): "
            "upgrade the dashboard"
        )
