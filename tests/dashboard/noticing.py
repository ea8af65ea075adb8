"""An incident to notify of, and the words for it."""

from __future__ import annotations

import factory
import msgspec

from kvlens.dashboard.model.incident import Incident, RequestScope
from kvlens.dashboard.view.wording import Wording

START = 1_790_000_000.25


def incident(**fields: object) -> Incident:
    made = Incident(
        id="zero_hit-1", kind="zero_hit", severity="critical", state="open", engine_id="node-a:0",
        incarnation_id="inc-a1", model=factory.MODEL, opened_at=START, updated_at=START,
        verdict="lost", cause="drafter_fallback", confidence="certain", summary="0 of 3,072 served",
        evidence={}, next_step="Upgrade", groups=[1, 2], example_requests=[], lost_tokens=3072,
        requests=3, scope=RequestScope(since=START, until=START),
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


WORDING = Wording("https://kv.example", "{kind} on {engine}", "{summary}; {next_step}",
                  "https://wiki.example/{kind}")  # fmt: skip
