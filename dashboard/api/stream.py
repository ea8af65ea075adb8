"""``/api/v1/stream``: incidents, engines and requests as server-sent events.

On connect the open incidents are replayed; after a reconnect also those that
changed since the last event, so that a closed one is not missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from kvlens.dashboard.api.deps import Services, ServicesDep
from kvlens.dashboard.api.hub import INCIDENT, Event, StreamClient
from kvlens.dashboard.model.incident import OPEN
from kvlens.dashboard.view.as_json import incidents_json

router = APIRouter(prefix="/api/v1", tags=["read"])
RETRY_MS: Final = 2000
_PACE: Final = 0.1
"""Seconds between two deliveries to one client: what happens in between is coalesced."""
_OVERLAP: Final = 5.0
"""Seconds replayed again after a reconnect: events carry no state, so twice is harmless."""


@router.get(
    "/stream",
    summary="Server-sent events: incident, engine, request",
    response_class=EventSourceResponse,
)
async def stream(request: Request, services: ServicesDep) -> EventSourceResponse:
    """Send open incidents first, then changes as they happen."""
    last_id = request.headers.get("last-event-id", "")
    return EventSourceResponse(_events(services, _since(last_id)), ping=15, send_timeout=30)


async def _events(services: Services, since: float | None) -> AsyncIterator[ServerSentEvent]:
    client = services.hub.join()
    try:
        # Joined before this read: what changes meanwhile comes twice, not never.
        for incident in await run_in_threadpool(_missed, services, since):
            yield _message(Event(INCIDENT, msgspec.json.encode(incident).decode()))
        yield ServerSentEvent(comment="ready", retry=RETRY_MS)
        async for event in _live(client):
            yield _message(event)
    finally:
        services.hub.leave(client)


async def _live(client: StreamClient) -> AsyncIterator[Event]:
    while True:
        for event in await client.take():
            yield event
        if client.closed:
            return
        await asyncio.sleep(_PACE)


def _missed(services: Services, since: float | None) -> list[dict[str, Any]]:
    """Oldest first: open incidents and, if ``since`` is given, those changed after it."""
    found = {incident.id: incident for incident in services.store.incidents(OPEN)}
    if since is not None:
        for incident in services.store.incidents(changed_since=since - _OVERLAP):
            found[incident.id] = incident
    oldest_first = sorted(found.values(), key=lambda incident: incident.opened_at)
    return incidents_json(oldest_first, services.store.handling)


def _message(event: Event) -> ServerSentEvent:
    """The id is the time of sending: all that a reconnect needs."""
    return ServerSentEvent(
        data=event.data, event=event.event, id=str(time.time_ns() // 1_000_000), retry=RETRY_MS
    )


def _since(last_event_id: str) -> float | None:
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16):
        return None
    return int(last_event_id) / 1000
