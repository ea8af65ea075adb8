"""``/api/v1/sizing`` and ``/sizing``: the curve of any engine and window."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse

from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.api.params import Time
from kvlens.dashboard.api.shapes import JSON, errors
from kvlens.dashboard.sizing import page, report
from kvlens.dashboard.sizing.stored import sized
from kvlens.dashboard.web.charts import DEFAULT_RANGE, RANGES, TimeRange
from kvlens.dashboard.web.templating import render
from kvlens.telemetry.sizing.measure import Question
from kvlens.telemetry.sizing.stack import Order

router = APIRouter()
Name = Annotated[str, Query(max_length=512)]
Tokens = Annotated[int, Query(ge=0, le=10**12)]


@router.get(
    "/api/v1/sizing",
    tags=["read"],
    summary="What a tier of each size would serve of an engine's requests",
    responses=errors(404),
)
def sizing(
    services: ServicesDep,
    engine: Name,
    since: Annotated[Time | None, Query()] = None,
    until: Annotated[Time | None, Query()] = None,
    gpu_tokens: Tokens = 0,
    order: Order = Order.FIRST_TO_LAST,
) -> JSON:
    """As `kvlens size --json`; by incarnation id, or the newest incarnation of an engine id.

    ``since`` and ``until`` are Unix seconds of finish, by default the last 24 hours.
    """
    found = services.store.engine(engine)
    if found is None:
        raise HTTPException(404, f"there is no engine {engine!r}")
    until = time.time() if until is None else until
    since = until - RANGES[DEFAULT_RANGE] if since is None else since
    if since > until:
        raise HTTPException(422, "since: is after until")
    curve = sized(services.store, found, since, until, Question(gpu_tokens=gpu_tokens, order=order))
    if curve is None:
        raise HTTPException(404, f"no request of engine {engine!r} names its blocks in this range")
    return JSON(report.as_json(curve))


@router.get("/sizing", include_in_schema=False, response_class=HTMLResponse)
def sizing_page(
    services: ServicesDep, request: Request, engine: str = "", range: str = DEFAULT_RANGE
) -> Response:
    """The curve as a page."""
    found = services.store.engine(engine)
    if found is None:
        return render(services, request, "missing.html", status=404, what="engine", ident=engine)
    window = TimeRange.named(range, time.time())
    curve = sized(services.store, found, window.since, window.until, Question())
    shown = page.shown(curve) if curve is not None else {"sized": None}
    return render(
        services, request, "sizing.html", page="overview", engine=found, window=window,
        ranges=list(RANGES), **shown,
    )  # fmt: skip
