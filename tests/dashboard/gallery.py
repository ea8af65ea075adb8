"""Records whose strips are hard to draw: one chunk, thousands, nine groups, deferrals."""

from __future__ import annotations

import msgspec

from kvlens.telemetry.records import (
    EngineInfo,
    GroupLayout,
    GroupLookup,
    Layout,
    Lookup,
    RequestRecord,
)

TOKENS = 16_384
STATE = 3_584


def nine_groups() -> Layout:
    """Chunks of 4 to 3,584 tokens over one prompt, windows, four recurrent groups."""
    shapes: list[tuple[str, int, dict[str, int | bool]]] = [
        ("full_attention", STATE, {}),
        ("full_attention", 4, {}),
        *[("mamba", STATE, {}) for _ in range(4)],
        ("sliding_window", 64, {"window": 64, "drafter": True, "drafter_used": True}),
        ("sliding_window", 128, {"window": 4_096}),
        ("chunked_local", 256, {"attention_chunk": 8_192}),
    ]
    groups = [
        GroupLayout(
            kv_group=index,
            group_kind=kind,
            tokens_per_block=chunk,
            tokens_per_chunk=chunk,
            **more,  # type: ignore[arg-type]
        )
        for index, (kind, chunk, more) in enumerate(shapes)
    ]
    return Layout(groups=groups, tokens_per_hash=4)


def gap_record(base: RequestRecord, finish: float) -> RequestRecord:
    """Nine groups; a single missing chunk of 4 tokens in 4,096 ends the prefix early."""
    local, boundary, gap = STATE, 2 * STATE, 9_001 // 4

    def query(group: int, start: int, width: int, hits: int, **more: object) -> GroupLookup:
        layout = nine_groups().groups[group]
        fields: dict[str, object] = {
            "kv_group": group,
            "group_kind": layout.group_kind,
            "tokens_per_chunk": layout.tokens_per_chunk,
            "drafter": layout.drafter_used,
            "start_chunk": start,
            "width": width,
            "raw_hits": hits,
            "boundary": boundary,
            "pass_number": 1,
            **more,
        }
        return msgspec.convert(fields, GroupLookup)

    groups = [
        query(0, 1, 3, 3, boundary=4 * STATE, resident=[(0, 3)]),
        query(
            1,
            local // 4,
            (4 * STATE - local) // 4,
            gap - local // 4,
            boundary=gap * 4,
            resident=[(0, gap - 1), (gap + 1, 4_095)],
        ),
        *[query(g, 1, 1, 1, resident=[(0, 1), (3, 3)], state_chunk=1) for g in (2, 3, 4, 5)],
        query(6, 56, 57, 57, popped=1, resident=[(50, 200)]),
        query(7, 28, 28, 28, resident=[(0, 127)]),
        query(8, 14, 14, 14, resident=[(0, 40)], truncated=True),
    ]
    lookup = Lookup(
        time=finish - 3,
        seconds=1.4e-3,
        local_tokens=local,
        num_tokens=TOKENS,
        attempt=1,
        exit="served",
        result=boundary - local,
        groups=groups,
        vetoing_group=1,
    )
    return msgspec.structs.replace(
        base,
        request_id="chatcmpl-8f14e45fceea167a5a36dedd4bea2543",
        internal_request_id="chatcmpl-8f14e45fceea167a5a36dedd4bea2543-0-a1b2c3d4",
        finish_time=finish,
        arrival_time=finish - 4.2,
        prompt_tokens=TOKENS,
        verdict="partial",
        cause="store_gap",
        causes=["store_gap"],
        local_tokens=local,
        served_tokens=boundary - local,
        servable_tokens=boundary - local,
        expected_tokens=4 * STATE - local,
        lost_tokens=2 * STATE,
        lost_at_store=2 * STATE,
        vetoing_group=1,
        summary=f"{boundary - local:,} of {4 * STATE - local:,} expected tokens served: "
        f"group 1 has a gap at chunk {gap:,}",
        evidence={"first_gap_chunk": gap, "kv_group": 1, "stored_after_gap": 4_095 - gap},
        next_step="Check for store failures between the chunks beside the gap.",
        lookups=[_deferred(finish), lookup],
        deferral_seconds=1.1,
    )


def _deferred(finish: float) -> Lookup:
    layout = nine_groups().groups[0]
    query = GroupLookup(
        kv_group=0,
        group_kind=layout.group_kind,
        tokens_per_chunk=layout.tokens_per_chunk,
        start_chunk=1,
        width=3,
        pass_number=1,
        resident=[(0, 3)],
    )
    return Lookup(
        time=finish - 4.1,
        last_time=finish - 3,
        count=312,
        seconds=9e-6,
        local_tokens=STATE,
        num_tokens=TOKENS,
        attempt=1,
        exit="deferred_backend",
        groups=[query],
    )


def nine_group_engine(base: EngineInfo) -> EngineInfo:
    """An engine with :func:`nine_groups`."""
    return msgspec.structs.replace(
        base,
        engine_id="gb200-rack12-node03.prod.eu-central:3",
        incarnation_id="7d0f7f0e-3c1a-4a59-9a3e-5b6f1f2d9c11",
        model="org/very-long-model-name-27B-Instruct-FP8-2026-09",
        layout=nine_groups(),
        block_drop=True,
    )
