"""The life of a request as bars over time: lookup, deferral, load, first computed token, end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.view.format import duration
from kvlens.dashboard.web.bars import percent
from kvlens.telemetry.records import RequestRecord

MOST_ROWS: Final = 40
_THINNEST: Final = 0.4
"""Percent: a lookup of 30 µs must still be seen."""


@dataclass(frozen=True)
class Step:
    """One bar. ``x`` and ``width`` are percentages of the whole, ``seconds`` its true length."""

    kind: str
    """``wait``, ``lookup``, ``deferral``, ``load``, ``compute`` or ``store``."""
    label: str
    detail: str
    after: float
    """Seconds from the arrival to its start."""
    seconds: float | None
    """None: it did not end while the request was watched."""
    x: str
    width: str


@dataclass(frozen=True)
class Waterfall:
    """All steps in order of their start, and the length of the axis in seconds."""

    steps: list[Step]
    seconds: float
    left_out: int


def waterfall(record: RequestRecord) -> Waterfall | None:
    """Lay out ``record``; None if it says nothing of what happened when."""
    spans = sorted(_spans(record), key=lambda span: span[3])
    if not spans:
        return None
    begin = min(record.arrival_time, spans[0][3])
    end = max(record.finish_time, *(start + (length or 0) for _, _, _, start, length in spans))
    whole = max(end - begin, 1e-6)
    steps = [
        Step(
            kind=kind,
            label=label,
            detail=detail,
            after=start - begin,
            seconds=length,
            x=percent(min(start - begin, whole * (1 - _THINNEST / 100)), whole),
            width=percent(
                max(end - start if length is None else length, whole * _THINNEST / 100), whole
            ),
        )
        for kind, label, detail, start, length in spans[:MOST_ROWS]
    ]
    return Waterfall(steps, whole, max(0, len(spans) - MOST_ROWS))


TimedStep = tuple[str, str, str, float, float | None]
"""Kind, label, detail, start (Unix seconds), length (seconds)."""


def _spans(record: RequestRecord) -> list[TimedStep]:
    spans: list[TimedStep] = []
    first = min((item.time for item in record.lookups), default=record.started_at)
    if first is not None and first > record.arrival_time:
        spans.append(
            (
                "wait",
                "Waiting",
                "From the arrival to the first lookup, or to its first step",
                record.arrival_time,
                first - record.arrival_time,
            )
        )
    for item in record.lookups:
        exit_ = item.exit.replace("_", " ")
        asked = f", asked {item.count:,} times" * (item.result is None or item.count > 1)
        lasted = max((item.last_time or item.time) - item.time, item.seconds)
        if item.result is None:
            spans.append(("deferral", "Deferred", f"{exit_}{asked}", item.time, lasted))
        else:
            detail = f"{exit_}: {item.result:,} tokens, attempt {item.attempt}{asked}"
            spans.append(("lookup", "Lookup", detail, item.time, lasted))
    for load in record.loads:
        chunks = sum(group.loaded for group in load.groups)
        took = (
            "" if load.transfer_seconds is None else f", {duration(load.transfer_seconds)} copying"
        )
        until = load.latency
        if load.failed and load.completed_at is not None:
            until = max(0.0, load.completed_at - load.time)
        failed = ", failed" * load.failed
        spans.append(("load", "Load", f"{chunks:,} chunks{took}{failed}", load.time, until))
    if record.started_at is not None:
        spans.append(
            (
                "compute",
                "Compute",
                f"From the first computed token; {record.output_tokens:,} tokens generated",
                record.started_at,
                max(0.0, record.finish_time - record.started_at),
            )
        )
    for store in record.stores:
        stored = sum(group.stored for group in store.groups)
        if stored:
            length = None if store.completed_at is None else store.completed_at - store.time
            failed = ", failed" * store.failed
            spans.append(("store", "Store", f"{stored:,} chunks{failed}", store.time, length))
    return spans
