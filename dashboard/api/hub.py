"""From the writer thread to the stream's clients: bounded, and never blocking.

Incidents and engines are coalesced (a slow client sees the newest state of
each), requests are dropped oldest first and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import OPEN, Incident
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.view.as_json import Handlings, engine_json, incidents_json, request_summary
from kvlens.telemetry.records import RequestRecord

INCIDENT: Final = "incident"
ENGINE: Final = "engine"
REQUEST: Final = "request"


class Event(NamedTuple):
    """One message of the stream; ``data`` is JSON."""

    event: str
    data: str


class StreamClient:
    """What one stream client has still to be sent; used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self._latest: dict[tuple[str, str], str] = {}
        self._requests: deque[str] = deque(maxlen=limit)
        self._wake = asyncio.Event()
        self.closed = False

    def put(self, kind: str, key: str, data: str) -> bool:
        """Queue one event; False if it pushed another out."""
        self._wake.set()
        if kind != REQUEST:
            self._latest[kind, key] = data
            return True
        full = len(self._requests) == self._requests.maxlen
        self._requests.append(data)
        return not full

    def close(self) -> None:
        """Let the stream end after what is queued."""
        self.closed = True
        self._wake.set()

    async def take(self) -> list[Event]:
        """Wait for events and take them all, incidents and engines first."""
        await self._wake.wait()
        self._wake.clear()
        events = [Event(kind, data) for (kind, _), data in self._latest.items()]
        events += [Event(REQUEST, data) for data in self._requests]
        self._latest.clear()
        self._requests.clear()
        return events


class Hub:
    """All clients of one application. Implements ``Writer``'s audience."""

    def __init__(
        self,
        metrics: SelfMetrics,
        limit: int,
        handling: Handlings,
        listeners: Sequence[Callable[[Incident], None]] = (),
    ) -> None:
        """``limit`` is the number of request events kept per client.

        ``handling`` tells what people did about incidents; ``listeners`` hear of each
        incident besides the clients, and must neither block nor raise.
        """
        self._metrics = metrics
        self._limit = limit
        self._handling = handling
        self._listeners = listeners
        self._clients: set[StreamClient] = set()
        self._open: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.stream_clients.set_function(lambda: len(self._clients))
        metrics.open_incidents.set_function(lambda: len(self._open))

    def bind(self, open_incidents: Sequence[Incident]) -> None:
        """Deliver on the running event loop from here on."""
        self._loop = asyncio.get_running_loop()
        self._open.update(incident.id for incident in open_incidents)

    def close(self) -> None:
        """End all streams; call on the event loop."""
        self._loop = None
        for client in self._clients:
            client.close()

    def join(self) -> StreamClient:
        """Add a client; call on the event loop."""
        client = StreamClient(self._limit)
        self._clients.add(client)
        if self._loop is None:
            client.close()
        return client

    def leave(self, client: StreamClient) -> None:
        """Forget a client."""
        self._clients.discard(client)

    # --- called on the writer thread --------------------------------------------

    def incident(self, incident: Incident) -> None:
        """Tell that an incident opened, changed or closed, or that somebody acted on it."""
        self.show(incident)
        for listener in self._listeners:
            listener(incident)

    def show(self, incident: Incident) -> None:
        """Tell the clients only."""
        (self._open.add if incident.state == OPEN else self._open.discard)(incident.id)
        if self._clients:
            (fields,) = incidents_json([incident], self._handling)
            self._send(INCIDENT, [(incident.id, msgspec.json.encode(fields).decode())])

    def engine(self, engine: Engine) -> None:
        """Tell that an engine sent something."""
        if self._clients:
            data = msgspec.json.encode(engine_json(engine, time.time())).decode()
            self._send(ENGINE, [(engine.info.incarnation_id, data)])

    def requests(self, records: Sequence[RequestRecord]) -> None:
        """Tell of stored requests; of many at once only the newest."""
        if self._clients and records:
            newest = records[-self._limit :]
            self._send(
                REQUEST,
                [("", msgspec.json.encode(request_summary(record)).decode()) for record in newest],
            )

    def _send(self, kind: str, items: list[tuple[str, str]]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, kind, items)

    def _deliver(self, kind: str, items: list[tuple[str, str]]) -> None:
        for client in self._clients:
            for key, data in items:
                if not client.put(kind, key, data):
                    self._metrics.stream_dropped.inc()
