"""An incident against what was before it: the same engine earlier, and its last version."""

from __future__ import annotations

from typing import NamedTuple

from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.totals import Totals, add_up
from kvlens.dashboard.store.base import Store
from kvlens.dashboard.view.format import plural
from kvlens.dashboard.web import comparison
from kvlens.dashboard.web.comparison import Line

BEFORE = 86_400
"""Seconds before the incident that are compared with it."""
_MINUTE = 60


class Versus(NamedTuple):
    """One comparison of two sides."""

    title: str
    note: str
    names: tuple[str, str]
    rows: list[Line]


def before_and_after(store: Store, incident: Incident) -> list[Versus]:
    """What there is to compare ``incident`` with; may be nothing."""
    engine = store.engine(incident.incarnation_id)
    if engine is None or engine.info.incarnation_id != incident.incarnation_id:
        return []
    since = incident.scope.since // _MINUTE * _MINUTE
    until = (incident.closed_at or incident.updated_at) // _MINUTE * _MINUTE + _MINUTE
    during = _sums(store, since, until, incident.incarnation_id)
    earlier = _sums(store, since - BEFORE, since - 1, incident.incarnation_id)
    found = []
    if _requests(earlier):
        note = f"{plural(_requests(earlier), 'request')} in the day before"
        found.append(
            Versus(
                "Before and during", note, ("before", "during"), comparison.lines(earlier, during)
            )
        )
    last = _last_version(store, engine)
    if last is not None:
        names = comparison.differing(
            comparison.key_of(last.info), comparison.key_of(engine.info)
        ) or ("the start before, same configuration", "this start")
        note = f"{plural(_requests(last.totals), 'request')} of the start before"
        found.append(
            Versus(
                "Against the start before",
                note,
                names,
                comparison.lines(last.totals, engine.totals),
            )
        )
    return found


def _sums(store: Store, since: float, until: float, incarnation: str) -> Totals:
    return add_up(store.series(since, until, _MINUTE, incarnation))


def _requests(totals: Totals) -> float:
    return sum(totals.requests.values())


def _last_version(store: Store, engine: Engine) -> Engine | None:
    """The newest earlier start of the same engine that finished requests."""
    info = engine.info
    earlier = [
        other
        for other in store.engines()
        if other.info.engine_id == info.engine_id
        and other.info.dp_rank == info.dp_rank
        and other.info.started_at < info.started_at
        and other.totals.requests
    ]
    return max(earlier, key=lambda other: other.info.started_at, default=None)
