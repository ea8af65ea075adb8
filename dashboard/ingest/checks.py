"""What a record and an engine must be before they reach the store.

Everything from outside that a query, an index, a sum or a page relies on is
checked here, besides what decoding checks (the range of every number); errors name
the field and what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvlens.telemetry import semconv
from kvlens.telemetry.records import EngineInfo, RecordError, RequestRecord

MAX_STRING: Final = 512
"""Characters of an id, a name or a model."""
_MAX_DEPTH: Final = 8
_LATEST: Final = 1e11
"""Unix seconds no clock shows: a time in another unit."""
_VERDICTS: Final = frozenset(map(str, semconv.Verdict))
_CAUSES: Final = frozenset(map(str, semconv.Cause))
_LEAST_PROBABILITY: Final = 1e-9
"""Each request counts as one by its probability: it must not outweigh all others."""
TRACE_ID: Final = re.compile(r"[0-9a-f]{32}\Z")
SPAN_ID: Final = re.compile(r"[0-9a-f]{16}\Z")


def check_engine(engine: EngineInfo) -> None:
    """Raise :class:`RecordError` if the engine cannot be kept."""
    _names(engine, ("engine_id", "incarnation_id", "model"))
    check_length(engine.host, "host", MAX_STRING)
    check_time(engine.started_at, "started_at")
    if not engine.layout.groups or any(g.tokens_per_chunk < 1 for g in engine.layout.groups):
        raise RecordError("layout has no groups, or one with tokens_per_chunk below 1")


def check_record(record: RequestRecord, engine: EngineInfo) -> None:
    """Raise :class:`RecordError` if the record cannot be kept."""
    _names(record, ("request_id", "internal_request_id", "engine_id", "model"))
    if record.incarnation_id != engine.incarnation_id:
        raise RecordError(
            f"incarnation_id {record.incarnation_id[:40]!r} is not the resource's "
            f"{engine.incarnation_id!r}"
        )
    _known(record.verdict, "verdict", _VERDICTS)
    for cause in filter(None, (record.cause, *record.causes)):
        _known(cause, "cause", _CAUSES)
    check_time(record.arrival_time, "arrival_time")
    check_time(record.finish_time, "finish_time")
    if not _shallow(record.evidence, _MAX_DEPTH):
        raise RecordError("evidence is nested too deeply")
    if not _LEAST_PROBABILITY <= record.sampling_probability <= 1:
        raise RecordError("sampling_probability is not above 0 and at most 1")
    if record.deferral_seconds < 0 or record.lost_gpu_seconds < 0:
        raise RecordError("deferral_seconds or lost_gpu_seconds is negative")
    if any(load.latency is not None and load.latency < 0 for load in record.loads):
        raise RecordError("latency of a load is negative")
    for name, pattern in (("trace_id", TRACE_ID), ("span_id", SPAN_ID)):
        value = getattr(record, name)
        if value and not pattern.match(value):
            raise RecordError(f"{name} {value[:40]!r} is not lower-case hex")


def _names(value: RequestRecord | EngineInfo, fields: Sequence[str]) -> None:
    for name in fields:
        text = getattr(value, name)
        if not text:
            raise RecordError(f"{name} is empty")
        check_length(text, name, MAX_STRING)


def check_length(text: str, name: str, limit: int) -> None:
    """Raise :class:`RecordError` for text of over ``limit`` characters."""
    if len(text) > limit:
        raise RecordError(f"{name} is longer than {limit:,} characters")


def check_time(value: float, name: str) -> float:
    """Return ``value``, Unix seconds; raises :class:`RecordError`."""
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
