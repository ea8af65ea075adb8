"""Engines, incidents and requests as the API, the stream and webhooks send them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvlens.dashboard.model.actions import Handling
from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.totals import Point, Totals, quantile
from kvlens.telemetry.records import RequestRecord

SERVING_FOR: Final = 120.0
"""Seconds after its last sign of life during which an engine counts as serving."""
_SUMMARY: Final = (
    "request_id",
    "internal_request_id",
    "engine_id",
    "incarnation_id",
    "model",
    "finish_time",
    "prompt_tokens",
    "local_tokens",
    "served_tokens",
    "servable_tokens",
    "expected_tokens",
    "lost_tokens",
    "verdict",
    "cause",
    "confidence",
    "summary",
)
_SUMS: Final = (
    "requests",
    "expected_tokens",
    "servable_tokens",
    "served_tokens",
    "lost_tokens",
    "lost_by_cause",
    "evicted_tokens",
    "lost_gpu_seconds",
    "deferrals",
    "deferral_seconds",
    "reuse_buckets",
)
_QUANTILES: Final = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def engine_state(engine: Engine, now: float) -> str:
    """``gone``, ``losing`` (an incident is open), ``serving`` or ``idle``."""
    if engine.ended_at is not None:
        return "gone"
    if engine.open_incidents:
        return "losing"
    return "serving" if now - engine.last_seen <= SERVING_FOR else "idle"


def engine_json(engine: Engine, now: float) -> dict[str, Any]:
    """EngineInfo's fields and what the dashboard knows besides."""
    return {
        **msgspec.to_builtins(engine.info),
        "state": engine_state(engine, now),
        "first_seen": engine.first_seen,
        "last_seen": engine.last_seen,
        "ended_at": engine.ended_at,
        "end_reason": engine.end_reason,
        "totals": totals_json(engine.totals),
        "open_incidents": engine.open_incidents,
    }


Handlings = Callable[[Sequence[str]], dict[str, Handling]]
"""What people did about incidents, by id: a store's ``handling``."""


def incidents_json(incidents: Iterable[Incident], handling: Handlings) -> list[dict[str, Any]]:
    """Fields of each Incident, and what people did about it as ``handling``."""
    by_id = {incident.id: incident for incident in incidents}
    done = handling(list(by_id))
    return [
        {**msgspec.to_builtins(incident), "handling": done[ident]}
        for ident, incident in by_id.items()
    ]


def totals_json(totals: Totals) -> dict[str, Any]:
    """Sums, with reload latency as count, mean and percentiles in seconds."""
    loads, buckets = totals.loads, totals.reload_buckets
    return {
        **{name: getattr(totals, name) for name in _SUMS},
        "reload": {
            "count": loads,
            "mean": totals.reload_seconds / loads if loads else None,
            **{name: quantile(buckets, q) if loads else None for name, q in _QUANTILES},
            "buckets": buckets,
        },
        "groups": {str(group): sums for group, sums in sorted(totals.groups.items())},
    }


def point_json(point: Point) -> dict[str, Any]:
    """One step of a series."""
    return {"time": point.time, **totals_json(point)}


def request_summary(record: RequestRecord) -> dict[str, Any]:
    """What a list of requests shows: no lookups, stores or loads."""
    return {name: getattr(record, name) for name in _SUMMARY}
