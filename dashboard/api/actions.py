"""Acknowledge, silence and annotate incidents, and the log of who did so."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Annotated, Final

from fastapi import APIRouter, Body, HTTPException, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kvlens.dashboard.api.deps import Services, ServicesDep
from kvlens.dashboard.api.params import AuditParams
from kvlens.dashboard.api.security import user_name
from kvlens.dashboard.api.shapes import JSON, errors
from kvlens.dashboard.ingest.writer import Busy
from kvlens.dashboard.model.actions import ACKNOWLEDGE, ANNOTATE, SILENCE, UNACKNOWLEDGE, Action
from kvlens.dashboard.model.batch import Batch
from kvlens.dashboard.model.incident import OPEN, Incident
from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.view.as_json import incidents_json

router = APIRouter(prefix="/api/v1", tags=["act"], default_response_class=JSON)
_ERRORS: Final = errors(400, 403, 404, 411, 413, 429, 503)
_DAY: Final = 86_400
_LONGEST_SILENCE: Final = 30 * _DAY
_PATIENCE: Final = 10.0
"""Seconds that an answer waits for the writer."""

Name = Annotated[str, StringConstraints(strip_whitespace=True, max_length=128)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)]


class _Act(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name = Field("", description="Who acts; default: the user name sent with the token")


class Acknowledge(_Act):
    """Somebody looks after the incident, or not any more."""

    acknowledged: bool = Field(True, description="false takes an acknowledgement back")
    text: Text = Field("", description="A note, kept with the incident")


class Silence(_Act):
    """Hold notifications back for a while."""

    seconds: int = Field(ge=0, le=_LONGEST_SILENCE, description="From now on; 0 ends a silence")
    text: Text = Field("", description="Why, kept with the incident")


class Annotate(_Act):
    """Write something on the incident."""

    text: Annotated[Text, Field(min_length=1, description="The note")]


@router.post(
    "/incidents/{ident}/acknowledge", summary="Say that somebody looks after it", responses=_ERRORS
)
def acknowledge(
    ident: str,
    request: Request,
    services: ServicesDep,
    body: Annotated[Acknowledge, Body(default_factory=Acknowledge)],
) -> JSON:
    """Kept in the audit log; answers with the incident."""
    kind = ACKNOWLEDGE if body.acknowledged else UNACKNOWLEDGE
    return _act(services, request, ident, body, kind, body.text)


@router.post(
    "/incidents/{ident}/silence",
    summary="Hold its notifications back",
    responses={**_ERRORS, **errors(409)},
)
def silence(ident: str, request: Request, services: ServicesDep, body: Silence) -> JSON:
    """Kept in the audit log; answers with the incident. 409 for a closed one."""
    return _act(services, request, ident, body, SILENCE, body.text, seconds=body.seconds)


@router.post("/incidents/{ident}/annotate", summary="Write a note on it", responses=_ERRORS)
def annotate(ident: str, request: Request, services: ServicesDep, body: Annotate) -> JSON:
    """Kept in the audit log; answers with the incident."""
    return _act(services, request, ident, body, ANNOTATE, body.text)


@router.get("/audit", summary="Who did what about which incident, newest first")
def audit(params: Annotated[AuditParams, Query()], services: ServicesDep) -> JSON:
    """One page; ``next_before`` is null on the last."""
    found = services.store.actions(params.before, params.limit)
    full = len(found) == params.limit
    return JSON({"actions": found, "next_before": found[-1].time if full else None})


def _act(
    services: Services,
    request: Request,
    ident: str,
    body: _Act,
    kind: str,
    text: str,
    *,
    seconds: int | None = None,
) -> JSON:
    incident = _known(services, ident)
    if seconds and incident.state != OPEN:
        raise HTTPException(409, f"incident {ident!r} is closed: there is nothing to silence")
    now = time.time()
    action = Action(
        id=uuid.uuid4().hex,
        incident_id=ident,
        time=now,
        kind=kind,
        who=body.name or _caller(services, request),
        address=request.client.host if request.client else "",
        text=text,
        until=None if seconds is None else now + seconds,
    )
    _store(services, action)
    return JSON(incidents_json([_known(services, ident)], services.store.handling)[0])


def _known(services: Services, ident: str) -> Incident:
    incident = services.store.incident(ident)
    if incident is None:
        raise HTTPException(404, f"there is no incident {ident!r}")
    return incident


def _store(services: Services, action: Action) -> None:
    try:
        with services.writer.slot():
            services.writer.submit(Batch(actions=[action])).result(_PATIENCE)
    except Busy as error:
        raise HTTPException(429, "the dashboard's queue is full: try again") from error
    except FutureTimeoutError as error:
        raise HTTPException(503, "the store does not answer: see whether it was kept") from error
    except StoreError as error:
        raise HTTPException(503, str(error)) from error


def _caller(services: Services, request: Request) -> str:
    """The user name of Basic, else what the caller holds."""
    if name := user_name(request.headers):
        return name
    return (
        "holder of the read token" if services.settings.read_token else "somebody on this machine"
    )
