"""What goes into a store at once, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlens.dashboard.model.actions import Action
from kvlens.dashboard.model.engine import EngineEvent
from kvlens.dashboard.model.scrape import Scrape
from kvlens.telemetry.records import EngineInfo, RequestRecord


class RecordRow(NamedTuple):
    """One request on its way into the store."""

    record: RequestRecord
    body: bytes
    """The record's JSON as received, packed by :func:`kvlens.dashboard.store.codec.pack`."""


class Batch(NamedTuple):
    """The accepted part of one export."""

    engines: Sequence[tuple[EngineInfo, float]] = ()
    """Who sent it, each with the newest time that it reported."""
    events: Sequence[EngineEvent] = ()
    rows: Sequence[RecordRow] = ()
    actions: Sequence[Action] = ()
    deferrals: Sequence[RequestRecord] = ()
    """Reports of requests that wait: for the detectors, not kept."""
    scrapes: Sequence[Scrape] = ()
    """The same for numbers read from servers."""


class Appended(NamedTuple):
    """What became durable: without duplicates, in the order of ``seq``."""

    records: Sequence[tuple[int, RequestRecord]]
    """``(seq, record)``; ``seq`` only grows."""
    duplicates: int
    touched: frozenset[str]
    """Incarnations that sent something."""
    ended: Sequence[tuple[str, float]]
    """Incarnations that ended with this call, and when."""
    acted_on: Sequence[str] = ()
    """Incidents about which somebody did something."""
