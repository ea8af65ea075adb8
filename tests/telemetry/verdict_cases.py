"""Builders of cases: the numbers follow from the residency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.state.residency import State
from kvlens.telemetry.verdict.judge import Case, expected_boundary
from kvlens.telemetry.verdict.oracle import servable_boundary
from kvlens.telemetry.verdict.search import search

R, C, E, P = State.RESIDENT, State.COMPUTED, State.EVICTED, State.PENDING
Chunks = dict[int, dict[int, State]]


def group(kv_group: int, kind: str, chunk: int, **fields: Any) -> GroupLayout:
    return GroupLayout(
        kv_group=kv_group, group_kind=kind, tokens_per_block=chunk, tokens_per_chunk=chunk, **fields
    )


def full(kv_group: int, chunk: int, **fields: Any) -> GroupLayout:
    return group(kv_group, "full_attention", chunk, **fields)


def mamba(kv_group: int, chunk: int, **fields: Any) -> GroupLayout:
    return group(kv_group, "mamba", chunk, **fields)


def sliding(kv_group: int, chunk: int, window: int, **fields: Any) -> GroupLayout:
    return group(kv_group, "sliding_window", chunk, window=window, **fields)


DRAFTER = {"drafter": True, "drafter_used": True}


def run(count: int, state: State = R, start: int = 0) -> dict[int, State]:
    return dict.fromkeys(range(start, start + count), state)


def case(groups: Iterable[GroupLayout], tokens: int, chunks: Chunks, **fields: Any) -> Case:
    """A case whose numbers follow from its residency; ``served`` is the engine's own search."""
    layout = Layout(groups=list(groups), tokens_per_hash=1)

    def state(kv_group: int, chunk: int) -> State:
        return chunks.get(kv_group, {}).get(chunk, State.NEVER_SEEN)

    def holds(kv_group: int, chunk: int) -> bool:
        return state(kv_group, chunk) is R

    local = fields.get("local", 0)
    stock = search(
        layout, holds, local, tokens,
        drafters={g.kv_group for g in layout.groups if g.drafter_used},
        widen=fields.get("widens", True), load_window=fields.get("load_window", True),
    )  # fmt: skip
    numbers = {
        "prompt_tokens": tokens,
        "num_tokens": tokens,
        "served": stock - local,
        "servable": servable_boundary(layout, holds, local, tokens) - local,
        "expected": expected_boundary(layout, state, local, tokens) - local,
        "seen_before": bool(chunks),
    }
    return Case(layout=layout, state=state, **(numbers | fields))
