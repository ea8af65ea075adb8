"""The web pages. Every page is complete without script; script only keeps it current."""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from kvlens.dashboard.api.deps import Services, ServicesDep
from kvlens.dashboard.ingest.scraper import Scraper
from kvlens.dashboard.model.incident import CLOSED, OPEN
from kvlens.dashboard.model.query import FoundRequests
from kvlens.dashboard.model.totals import quantile
from kvlens.dashboard.notify.notifier import wording
from kvlens.dashboard.store.base import TooSlowError
from kvlens.dashboard.web import comparison, views
from kvlens.dashboard.web.assets import assets, version
from kvlens.dashboard.web.charts import DEFAULT_RANGE, TimeRange
from kvlens.dashboard.web.costs import cost_page
from kvlens.dashboard.web.request_form import SORTS, RequestForm
from kvlens.dashboard.web.templating import render
from kvlens.telemetry.semconv import Cause, Verdict

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def overview(services: ServicesDep, request: Request, range: str = DEFAULT_RANGE) -> Response:
    """The fleet at a glance, worst first."""
    scraper: Scraper = request.app.state.scraper
    view = views.overview(services.store, TimeRange.named(range, time.time()), scraper.status)
    return render(services, request, "overview.html", page="overview", view=view)


@router.get("/engines/{ident:path}")
def engine(
    services: ServicesDep, request: Request, ident: str, range: str = DEFAULT_RANGE
) -> Response:
    """One incarnation of an engine."""
    found = services.store.engine(ident)
    if found is None:
        return _missing(services, request, "engine", ident)
    view = views.engine_page(services.store, found, TimeRange.named(range, time.time()))
    return render(services, request, "engine.html", view=view, page="overview", quantile=quantile)


@router.get("/incidents")
def incidents(services: ServicesDep, request: Request) -> Response:
    """Open incidents, then closed ones."""
    closed = services.store.incidents(CLOSED, limit=views.LISTED + 1)
    return render(
        services,
        request,
        "incidents.html",
        page="incidents",
        open=views.worst_first(services.store.incidents(OPEN)),
        closed=closed[: views.LISTED],
        older=len(closed) > views.LISTED,
        engines=len(services.store.engines()),
    )


@router.get("/incidents/{ident:path}")
def incident(services: ServicesDep, request: Request, ident: str) -> Response:
    """Verdict, evidence, affected requests and timeline of one incident."""
    found = services.store.incident(ident)
    if found is None:
        return _missing(services, request, "incident", ident)
    view = views.incident_page(services.store, found)
    runbook = (
        wording(services.settings).runbook(found)
        if services.settings.runbook_url_template
        else f"/runbooks/{found.kind}"
    )
    return render(
        services,
        request,
        "incident.html",
        page="incidents",
        view=view,
        runbook=runbook,
        handling=services.store.handling([found.id])[found.id],
    )


@router.get("/compare")
def compare(services: ServicesDep, request: Request, a: str = "", b: str = "") -> Response:
    """Two versions or configurations side by side."""
    known = comparison.sides(services.store.engines())
    pair = comparison.choose(known, a, b)
    rows = comparison.lines(pair[0].totals, pair[1].totals) if pair else []
    names = comparison.differing(pair[0].key, pair[1].key) if pair else None
    return render(
        services,
        request,
        "compare.html",
        page="compare",
        sides=known,
        pair=pair,
        rows=rows,
        names=names,
    )


@router.get("/cost")
def cost(services: ServicesDep, request: Request, range: str = DEFAULT_RANGE) -> Response:
    """What the losses cost."""
    view = cost_page(services.store, TimeRange.named(range, time.time()))
    return render(services, request, "cost.html", page="cost", view=view)


@router.get("/requests")
def requests(services: ServicesDep, request: Request) -> Response:
    """Finished requests."""
    filters = RequestForm.parse(request.query_params)
    errors = list(filters.errors)
    found: FoundRequests | None = None
    try:
        try:
            found = services.store.requests(filters.query(time.time()))
        except ValueError as error:
            errors.append(f"cursor: {error}")
            filters = replace(filters, cursor="")
            found = services.store.requests(filters.query(time.time()))
    except TooSlowError as error:
        errors.append(str(error))
    engines = services.store.engines()
    return render(
        services,
        request,
        "requests.html",
        status=400 if errors else 200,
        page="requests",
        filters=filters,
        errors=errors,
        records=found.records if found else None,
        next_cursor=found.next_cursor if found else None,
        engines=engines,
        models=sorted({item.info.model for item in engines}),
        verdicts=[str(item) for item in Verdict],
        causes=[str(item) for item in Cause],
        sorts=SORTS,
    )


@router.get("/requests/{ident:path}")
def one_request(
    services: ServicesDep, request: Request, ident: str, lookup: int | None = None
) -> Response:
    """One request with its chunk strip."""
    record = services.store.request(ident)
    if record is None:
        return _missing(services, request, "request", ident)
    view = views.request_page(services.store, record, lookup)
    return render(
        services,
        request,
        "request.html",
        page="requests",
        view=view,
        trace_url=services.settings.trace_url(record.trace_id),
    )


@router.get("/static/{tag}/{path:path}")
def static(tag: str, path: str) -> Response:
    """One static file; cached for good under the current tag only."""
    asset = assets().get(path)
    if asset is None:
        return Response("no such file", status_code=404, media_type="text/plain")
    caching = "public, max-age=31536000, immutable" if tag == version() else "no-cache"
    return Response(
        asset.body,
        media_type=asset.media_type,
        headers={"Cache-Control": caching, "X-Content-Type-Options": "nosniff"},
    )


@router.get("/favicon.ico")
def favicon() -> Response:
    """The icon, for browsers that ask for it without reading the page."""
    return static(version(), "favicon.svg")


def _missing(services: Services, request: Request, what: str, ident: str) -> Response:
    return render(services, request, "missing.html", status=404, what=what, ident=ident)
