"""An incident to notify of, and the words for it."""

from __future__ import annotations

import factory
import msgspec

from kvlens.dashboard.model.incident import Incident, RequestScope
from kvlens.dashboard.view.wording import Wording

START = 1_790_000_000.25


def incident(**fields: object) -> Incident:
    made = Incident(
        id="zero_hit-1",
        kind="zero_hit",
        severity="critical",
        state="open",
        engine_id="node-a:0",
        incarnation_id="inc-a1",
        model=factory.MODEL,
        opened_at=START,
        updated_at=START,
        verdict="lost",
        cause="drafter_fallback",
        confidence="certain",
        summary="0 of 3,072 served",
        evidence={},
        next_step="Upgrade",
        groups=[1, 2],
        example_requests=[],
        lost_tokens=3072,
        requests=3,
        scope=RequestScope(since=START, until=START),
    )
    return msgspec.structs.replace(made, **fields)


def kept(
    ident: str,
    state: str = "open",
    opened_at: float = factory.START,
    info: factory.EngineInfo | None = None,
) -> Incident:
    """An incident as a store keeps it: opened, and if ``closed`` then at once."""
    engine = info or factory.engine()
    return incident(
        id=ident,
        state=state,
        engine_id=engine.engine_id,
        incarnation_id=engine.incarnation_id,
        model=engine.model,
        opened_at=opened_at,
        updated_at=opened_at,
        closed_at=opened_at if state == "closed" else None,
        summary=f"summary of {ident}",
        scope=RequestScope(since=opened_at, until=opened_at),
    )


WORDING = Wording(
    "https://kv.example",
    "{kind} on {engine}",
    "{summary}; {next_step}",
    "https://wiki.example/{kind}",
)
