"""Pages from templates: escaping always on, no script or style outside of files."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvlens.dashboard.api.deps import Services
from kvlens.dashboard.model.incident import OPEN, Incident
from kvlens.dashboard.view import format, words
from kvlens.dashboard.view.as_json import engine_state
from kvlens.dashboard.web import assets


@cache
def environment() -> Environment:
    """The one template environment; a name that a template misspells is an error."""
    env = Environment(
        loader=PackageLoader("kvlens.dashboard.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(
        count=format.count,
        compact=format.compact,
        size=format.size,
        duration=format.duration,
        utc=format.utc,
        clock=format.clock,
        iso=format.iso,
        stamp=format.stamp,
        path=format.path,
        words=format.words,
        short=format.short,
        plural=format.plural,
        verdict=words.verdict,
        cause=words.cause,
        incident=words.incident,
    )
    env.globals.update(
        percent=format.percent,
        ago=format.ago,
        help=words.HELP,
        cells=words.CELLS,
        exits=words.EXITS,
        engine_words=words.ENGINES,
        target_words=words.TARGETS,
        engine_state=engine_state,
        asset=lambda path: f"/static/{assets.version()}/{path}",
    )
    return env


def render(
    services: Services,
    request: Request,
    template: str,
    *,
    status: int = 200,
    page: str = "",
    **context: Any,
) -> HTMLResponse:
    """Render ``template``; ``page`` is the entry of the navigation that is current."""
    open_incidents = services.store.incidents(OPEN)
    context.update(
        page=page,
        now=time.time(),
        origin=str(request.base_url).rstrip("/"),
        open_incidents=len(open_incidents),
        known=_marks(services, open_incidents),
    )
    text = environment().get_template(template).render(context)
    return HTMLResponse(text, status_code=status)


def _marks(services: Services, incidents: list[Incident]) -> dict[str, str]:
    """What ``live.js`` compares: as its ``mark()`` makes it of an event."""
    handling = services.store.handling([incident.id for incident in incidents])
    return {
        incident.id: f"{_number(incident.updated_at)},{_number(handling[incident.id].acted_at)}"
        for incident in incidents
    }


def _number(value: float | None) -> str:
    """As JavaScript prints it; nothing of None."""
    return "" if value is None else msgspec.json.encode(value).decode().removesuffix(".0")
