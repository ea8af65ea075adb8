"""``/api/v1``: engines, incidents, requests and series."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query

from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.api.params import (
    IncidentParams,
    RequestPageParams,
    SeriesParams,
)
from kvlens.dashboard.api.shapes import JSON, errors
from kvlens.dashboard.model.incident import CLOSED, OPEN, Incident
from kvlens.dashboard.model.query import FoundRequests, RequestQuery
from kvlens.dashboard.store.base import Store, TooSlowError
from kvlens.dashboard.view.as_json import engine_json, incidents_json, point_json

router = APIRouter(prefix="/api/v1", tags=["read"], default_response_class=JSON)
_DAY: Final = 86_400.0
_MAX_POINTS: Final = 10_000
_CLOSED_LISTED: Final = 200


@router.get("/engines", summary="All known incarnations, newest first")
def engines(services: ServicesDep) -> JSON:
    """Each with its state, totals and number of open incidents."""
    now = time.time()
    return JSON({"engines": [engine_json(engine, now) for engine in services.store.engines()]})


@router.get("/engines/{ident:path}", summary="One engine", responses=errors(404))
def engine(ident: str, services: ServicesDep) -> JSON:
    """By incarnation id, or the newest incarnation of an engine id."""
    found = services.store.engine(ident)
    if found is None:
        raise HTTPException(404, f"there is no engine {ident!r}")
    return JSON(engine_json(found, time.time()))


@router.get("/incidents", summary="Incidents, newest first")
def incidents(params: Annotated[IncidentParams, Query()], services: ServicesDep) -> JSON:
    """Return open and closed ones unless ``state`` is given."""
    found = _incidents(services.store, params)
    return JSON({"incidents": incidents_json(found, services.store.handling)})


@router.get("/incidents/{ident:path}", summary="One incident", responses=errors(404))
def incident(ident: str, services: ServicesDep) -> JSON:
    """By id."""
    found = services.store.incident(ident)
    if found is None:
        raise HTTPException(404, f"there is no incident {ident!r}")
    return JSON(incidents_json([found], services.store.handling)[0])


@router.get("/requests", summary="Finished requests", responses=errors(404))
def requests(params: Annotated[RequestPageParams, Query()], services: ServicesDep) -> JSON:
    """One page of whole records; ``next_cursor`` is null on the last."""
    query = params.query(services.store, params.limit, params.cursor)
    page = _page(services.store, query)
    return JSON({"requests": page.records, "next_cursor": page.next_cursor})


@router.get("/requests/{ident:path}", summary="One request", responses=errors(404))
def request(ident: str, services: ServicesDep) -> JSON:
    """By internal or external id (of several, the newest), with its engine's layout."""
    record = services.store.request(ident)
    if record is None:
        raise HTTPException(404, f"there is no request {ident!r}")
    engine = services.store.engine(record.incarnation_id)
    answer: dict[str, Any] = {
        "request": record,
        "layout": None if engine is None else engine.info.layout,
        "trace_url": services.settings.trace_url(record.trace_id),
    }
    return JSON(answer)


@router.get("/series", summary="Sums per step for charts")
def series(params: Annotated[SeriesParams, Query()], services: ServicesDep) -> JSON:
    """Steps without a finished request are left out."""
    until = time.time() if params.until is None else params.until
    since = until - _DAY if params.since is None else params.since
    if since > until:
        raise HTTPException(422, "since: is after until")
    if (until - since) / params.step > _MAX_POINTS:
        raise HTTPException(422, f"step: gives over {_MAX_POINTS:,} points, use a larger one")
    points = services.store.series(since, until, params.step, params.engine)
    return JSON({"step": params.step, "series": [point_json(point) for point in points]})


def _incidents(store: Store, params: IncidentParams) -> list[Incident]:
    """Newest first; without a limit no open one is left out, however old."""
    if params.limit is not None:
        return store.incidents(params.state, engine=params.engine, limit=params.limit)
    found = []
    if params.state != CLOSED:
        found += store.incidents(OPEN, engine=params.engine)
    if params.state != OPEN:
        found += store.incidents(CLOSED, engine=params.engine, limit=_CLOSED_LISTED)
    return sorted(found, key=lambda incident: (-incident.opened_at, incident.id))


def _page(store: Store, query: RequestQuery) -> FoundRequests:
    try:
        return store.requests(query)
    except ValueError as error:
        raise HTTPException(422, f"cursor: {error}") from error
    except TooSlowError as error:
        raise HTTPException(422, f"sort: {error}") from error
