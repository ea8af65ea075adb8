"""What the overview, engine, incident and request pages show, read from the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvlens.dashboard.ingest.scraper import TargetStatus
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import CLOSED, OPEN, Incident
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.model.totals import Totals, add_up
from kvlens.dashboard.store.base import Store
from kvlens.dashboard.view.format import count
from kvlens.dashboard.view.strip import build_strip, decisive_lookup
from kvlens.dashboard.web import bars, charts, plot
from kvlens.dashboard.web.before import Versus, before_and_after
from kvlens.dashboard.web.groups import GroupRow, group_rows
from kvlens.dashboard.web.sizing import Sizing, sizing
from kvlens.dashboard.web.waterfall import Waterfall, waterfall
from kvlens.telemetry.records import EngineInfo, Lookup, RequestRecord
from kvlens.telemetry.semconv import Severity

RECENT = 8
AFFECTED = 50
LISTED = 500
"""Closed incidents on a page, the newest; open ones are all there."""


def worst_first(incidents: list[Incident]) -> list[Incident]:
    """Critical before warning, then by tokens lost, then newest."""
    return sorted(
        incidents,
        key=lambda item: (item.severity != Severity.CRITICAL, -item.lost_tokens, -item.opened_at),
    )


@dataclass(frozen=True)
class Overview:
    """The fleet at a glance; ``totals`` and ``chart`` cover ``window``."""

    incidents: list[Incident]
    engines: list[Engine]
    totals: Totals
    chart: charts.Chart | None
    window: charts.TimeRange
    lost: list[RequestRecord]
    targets: list[ScrapedTarget]

    @property
    def critical(self) -> int:
        """Open critical incidents."""
        return sum(item.severity == Severity.CRITICAL for item in self.incidents)

    @property
    def running(self) -> int:
        """Engines that have not ended."""
        return sum(engine.ended_at is None for engine in self.engines)


class ScrapedTarget(NamedTuple):
    """One server whose ``/metrics`` are read, and the open incidents of its engines."""

    status: TargetStatus
    incidents: list[Incident]


def _targets(scraped: Sequence[TargetStatus], incidents: Sequence[Incident]) -> list[ScrapedTarget]:
    """Worst first: with incidents, then those that do not answer."""
    found = [
        ScrapedTarget(
            status, [item for item in incidents if item.engine_id.startswith(f"{status.target}/")]
        )
        for status in scraped
    ]
    return sorted(
        found,
        key=lambda one: (-len(one.incidents), one.status.state == "up", one.status.target),
    )


def overview(
    store: Store, window: charts.TimeRange, scraped: Sequence[TargetStatus] = ()
) -> Overview:
    """Read the overview; ``scraped`` are the targets as the scraper knows them."""
    points = store.series(window.since, window.until, window.step, None)
    engines = sorted(
        store.engines(),
        key=lambda item: (
            -item.open_incidents,
            item.ended_at is not None,
            -item.totals.lost_tokens,
            -item.info.started_at,
        ),
    )
    incidents = worst_first(store.incidents(OPEN))
    return Overview(
        incidents=incidents,
        engines=engines,
        totals=add_up(points),
        chart=charts.token_chart(points, window),
        window=window,
        lost=store.requests(RequestQuery(min_lost_tokens=1, limit=RECENT)).records,
        targets=_targets(scraped, incidents),
    )


@dataclass(frozen=True)
class EnginePage:
    """One incarnation."""

    engine: Engine
    totals: Totals
    chart: charts.Chart | None
    window: charts.TimeRange
    groups: list[GroupRow]
    sizing: Sizing | None
    incidents: list[Incident]
    """All open ones, worst first."""
    closed: list[Incident]
    """The newest closed ones."""
    requests: list[RequestRecord]

    @property
    def all_drafters(self) -> bool:
        """Fingerprint of the drafter fallback: all groups popped, none of them annotated."""
        groups = self.engine.info.layout.groups
        return all(g.drafter_used for g in groups) and not any(g.drafter for g in groups)


def engine_page(store: Store, engine: Engine, window: charts.TimeRange) -> EnginePage:
    """Read the page of ``engine``."""
    incarnation = engine.info.incarnation_id
    points = store.series(window.since, window.until, window.step, incarnation)
    totals = add_up(points)
    return EnginePage(
        engine=engine,
        totals=totals,
        groups=group_rows(engine.info, points, totals.groups, window),
        sizing=sizing(totals, engine.info.capacity_chunks),
        chart=charts.token_chart(points, window),
        window=window,
        incidents=worst_first(store.incidents(OPEN, engine=incarnation)),
        closed=store.incidents(CLOSED, engine=incarnation, limit=LISTED),
        requests=store.requests(RequestQuery(engine=incarnation, limit=RECENT)).records,
    )


class Evidence(NamedTuple):
    """One fact behind a verdict: its name and its value as text."""

    name: str
    value: str


def evidence_rows(evidence: dict[str, Any]) -> list[Evidence]:
    """Evidence as text, whatever its shape: it comes from outside."""
    return [Evidence(name.replace("_", " "), _text(value)) for name, value in evidence.items()]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "not known"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, list) and all(isinstance(item, (int, str)) for item in value):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, dict) and all(isinstance(item, (int, str)) for item in value.values()):
        return ", ".join(f"{key.replace('_', ' ')} {item}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class IncidentPage:
    """One incident with the requests in its scope."""

    incident: Incident
    engine: EngineInfo | None
    evidence: list[Evidence]
    requests: list[RequestRecord]
    more: str | None
    versus: list[Versus]


def incident_page(store: Store, incident: Incident) -> IncidentPage:
    """Read the page of ``incident``."""
    scope = incident.scope
    page = store.requests(
        RequestQuery(
            since=scope.since,
            until=scope.until,
            engine=incident.incarnation_id,
            min_expected_tokens=scope.min_expected_tokens,
            max_served_tokens=scope.max_served_tokens,
            min_lost_tokens=scope.min_lost_tokens,
            verdicts=scope.verdicts,
            cause=scope.cause,
            limit=AFFECTED,
        )
    )
    engine = store.engine(incident.incarnation_id)
    return IncidentPage(
        incident=incident,
        engine=engine.info if engine else None,
        evidence=evidence_rows(incident.evidence),
        requests=page.records,
        more=page.next_cursor,
        versus=before_and_after(store, incident),
    )


@dataclass(frozen=True)
class RequestPage:
    """One request under the microscope."""

    record: RequestRecord
    engine: EngineInfo | None
    parts: list[bars.Part]
    plot: plot.Plot | None
    shown: Lookup | None
    decisive: Lookup | None
    evidence: list[Evidence]
    incidents: list[Incident]
    waterfall: Waterfall | None
    raw: str


def request_page(store: Store, record: RequestRecord, lookup: int | None = None) -> RequestPage:
    """Read the page of ``record``; ``lookup`` picks another lookup for the strip by index."""
    engine = store.engine(record.incarnation_id)
    # An engine id names its newest incarnation: never draw with another one's layout.
    info = engine.info if engine and engine.info.incarnation_id == record.incarnation_id else None
    decisive = decisive_lookup(record)
    chosen = lookup is not None and 0 <= lookup < len(record.lookups)
    shown = record.lookups[lookup] if chosen and lookup is not None else decisive
    strip = build_strip(record, info.layout if info else None, shown)
    return RequestPage(
        record=record,
        engine=info,
        parts=bars.token_parts(record),
        plot=plot.draw(strip) if strip else None,
        shown=shown,
        decisive=decisive,
        evidence=evidence_rows(record.evidence),
        incidents=store.incidents(engine=record.incarnation_id, at=record.finish_time)
        if record.lost_tokens
        else [],
        waterfall=waterfall(record),
        raw=msgspec.json.format(msgspec.json.encode(record), indent=2).decode(),
    )
