from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import factory
import msgspec

from kvlens.dashboard.api.hub import Event, Hub, StreamClient
from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.selfmetrics import SelfMetrics

INFO = factory.engine()


def unhandled(idents: Sequence[str]) -> dict[str, Handling]:
    return dict.fromkeys(idents, Handling())


def incident(count: int = 3) -> Incident:
    detector = ZeroHit()
    found = [detector.observe(factory.lost_record(n, INFO), INFO) for n in range(count)]
    last = found[-1]
    assert last is not None
    return last


def from_thread(*calls: object) -> None:
    """Publish as the writer does: on another thread, in order."""

    def run() -> None:
        for call, argument in calls:  # type: ignore[misc]
            call(argument)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def test_coalesced_bounded_and_counted() -> None:
    metrics = SelfMetrics()
    value = metrics.registry.get_sample_value

    async def scenario() -> list[Event]:
        hub = Hub(metrics, limit=2, handling=unhandled)
        hub.bind([])
        client = hub.join()
        assert value("kvlens_dashboard_stream_clients") == 1
        records = [factory.lost_record(n, INFO) for n in range(5)]
        from_thread(
            (hub.requests, records[:3]),
            (hub.incident, incident(3)),
            (hub.requests, records[3:4]),
            (hub.incident, incident(4)),
        )
        events = await client.take()
        hub.leave(client)
        return events

    events = asyncio.run(scenario())
    assert [event.event for event in events] == ["incident", "request", "request"]
    assert json.loads(events[0].data)["requests"] == 4
    summaries = [json.loads(event.data) for event in events[1:]]
    assert [summary["request_id"] for summary in summaries] == ["cmpl-0002", "cmpl-0003"]
    assert summaries[0]["verdict"] == "lost"
    assert "lookups" not in summaries[0]
    assert value("kvlens_dashboard_stream_dropped_events_total") == 1
    assert value("kvlens_dashboard_stream_clients") == 0
    assert value("kvlens_dashboard_open_incidents") == 1


def test_open_incidents_are_counted_without_clients() -> None:
    metrics = SelfMetrics()

    async def scenario() -> None:
        hub = Hub(metrics, limit=2, handling=unhandled)
        hub.bind([incident()])
        from_thread((hub.incident, msgspec.structs.replace(incident(), state="closed")))

    asyncio.run(scenario())
    assert metrics.registry.get_sample_value("kvlens_dashboard_open_incidents") == 0


def test_close_wakes_and_ends_clients() -> None:
    async def scenario() -> tuple[StreamClient, StreamClient]:
        hub = Hub(SelfMetrics(), limit=2, handling=unhandled)
        hub.bind([])
        waiting = hub.join()
        task = asyncio.create_task(waiting.take())
        await asyncio.sleep(0)
        hub.close()
        assert await asyncio.wait_for(task, 5) == []
        from_thread((hub.incident, incident()))  # the writer may still be at work
        return waiting, hub.join()

    waiting, late = asyncio.run(scenario())
    assert waiting.closed
    assert late.closed


def test_publishing_after_the_loop_ended_counts_and_delivers_nothing() -> None:
    metrics = SelfMetrics()
    hub = Hub(metrics, limit=2, handling=unhandled)

    async def scenario() -> StreamClient:
        hub.bind([])
        return hub.join()

    client = asyncio.run(scenario())
    records = [factory.lost_record(n, INFO) for n in range(5)]
    from_thread((hub.requests, records), (hub.incident, incident()))
    assert not client.closed
    assert metrics.registry.get_sample_value("kvlens_dashboard_open_incidents") == 1
    assert metrics.registry.get_sample_value("kvlens_dashboard_stream_dropped_events_total") == 0
    client.close()
    assert asyncio.run(client.take()) == []
