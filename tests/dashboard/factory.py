"""Realistic engines and records: a hybrid layout of three groups, chunk 512.

``lost_record`` is the shape of the defect on an affected engine: no group is
annotated as a drafter group, the connector treats all of them as one, and the
pop brings the groups whose window is one chunk to zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.engine import EngineEvent
from kvlens.dashboard.store.codec import pack
from kvlens.telemetry.records import (
    Correction,
    EngineInfo,
    GroupChunks,
    GroupLayout,
    GroupLookup,
    Layout,
    Load,
    Lookup,
    RequestRecord,
    Store,
    encode,
)

CHUNK = 512
START = time.time() // 60 * 60 - 1800.0
"""Start of the default engine, Unix seconds: a full minute, recent enough to be retained."""
MODEL = "tiny-hybrid-eagle"
KINDS = ("full_attention", "sliding_window", "mamba")


def layout(*, affected: bool = True) -> Layout:
    windows = {"sliding_window": 128}
    groups = [
        GroupLayout(
            kv_group=index,
            group_kind=kind,
            tokens_per_block=CHUNK,
            tokens_per_chunk=CHUNK,
            window=windows.get(kind),
            drafter_used=affected,
        )
        for index, kind in enumerate(KINDS)
    ]
    return Layout(groups=groups, tokens_per_hash=CHUNK)


def engine(
    engine_id: str = "node-a:0",
    incarnation_id: str = "inc-a1",
    *,
    affected: bool = True,
    started_at: float = START,
    model: str = MODEL,
) -> EngineInfo:
    return EngineInfo(
        engine_id=engine_id,
        incarnation_id=incarnation_id,
        model=model,
        started_at=started_at,
        kvlens_version="0.1.0",
        vllm_version="0.29.0" if affected else "0.32.0",
        layout=layout(affected=affected),
        lookup="stock" if affected else "corrected",
        corrections=[
            Correction(name="drafter_fallback", state="off" if affected else "not_needed")
        ],
        host="node-a",
        block_drop=True,
        capacity_chunks=293,
    )


def _lookup(at: float, prompt: int, chunks: int, *, served: bool) -> Lookup:
    """Look up ``chunks`` complete chunks; only full attention needs all of them."""
    drafter = not served
    groups = []
    for index, kind in enumerate(KINDS):
        width = chunks if kind == "full_attention" else 1
        popped = int(drafter)
        groups.append(
            GroupLookup(
                kv_group=index,
                group_kind=kind,
                tokens_per_chunk=CHUNK,
                drafter=drafter,
                start_chunk=chunks - width,
                width=width,
                raw_hits=width,
                popped=popped,
                boundary=(chunks - popped) * CHUNK if width > popped else 0,
                pass_number=1,
                resident=[(0, chunks - 1)] if kind != "mamba" else [(chunks - 1, chunks - 1)],
                state_chunk=chunks - 1 if served and kind == "mamba" else None,
            )
        )
    return Lookup(
        time=at,
        seconds=31e-6,
        local_tokens=0,
        num_tokens=prompt,
        attempt=1,
        exit="served" if served else "vetoed",
        result=chunks * CHUNK if served else 0,
        groups=groups,
        vetoing_group=None if served else 1,
    )


def _base(index: int, info: EngineInfo, finish: float | None, **fields: object) -> RequestRecord:
    finish = info.started_at + 10.0 + index if finish is None else finish
    record = RequestRecord(
        request_id=f"cmpl-{index:04d}",
        internal_request_id=f"cmpl-{index:04d}-0-{info.incarnation_id}",
        engine_id=info.engine_id,
        incarnation_id=info.incarnation_id,
        model=info.model,
        arrival_time=finish - 0.8,
        finish_time=finish,
        prompt_tokens=1100,
        verdict="cold",
        trace_id=f"{index + 1:032x}",
        span_id=f"{index + 1:016x}",
        output_tokens=8,
        finish_reason="length",
        started_at=finish - 0.7,
        resident_chunks={0: 120 + index % 40, 1: 40 + index % 7, 2: 30 + index % 5},
        reuse_distance=2 ** (4 + index % 6) + index % 13,
    )
    return msgspec.structs.replace(record, **fields)


def lost_record(
    index: int, info: EngineInfo | None = None, *, chunks: int = 2, finish: float | None = None
) -> RequestRecord:
    """Stored, resident, and still 0 served."""
    info = info or engine()
    tokens = chunks * CHUNK
    base = _base(index, info, finish)
    return msgspec.structs.replace(
        base,
        prompt_tokens=tokens + 76,
        verdict="lost",
        cause="drafter_fallback",
        causes=["drafter_fallback"],
        servable_tokens=tokens,
        expected_tokens=tokens,
        lost_tokens=tokens,
        lost_at_lookup=tokens,
        lost_gpu_seconds=tokens / 1600,
        vetoing_group=1,
        summary=f"0 of {tokens:,} resident tokens served: group 1 had 1 hit and lost it to the pop",
        evidence={"drafter_groups": [0, 1, 2], "annotated_drafter_groups": []},
        next_step="Use vLLM 0.30.0 or newer, or run the connector with lookup=corrected.",
        lookups=[_lookup(base.arrival_time + 0.01, tokens + 76, chunks, served=False)],
        stores=[_store(base.finish_time - 0.1, already=chunks)],
    )


def served_record(
    index: int, info: EngineInfo | None = None, *, chunks: int = 2, finish: float | None = None
) -> RequestRecord:
    """All that could be served was."""
    info = info or engine(affected=False)
    tokens = chunks * CHUNK
    base = _base(index, info, finish)
    return msgspec.structs.replace(
        base,
        prompt_tokens=tokens + 76,
        verdict="full",
        served_tokens=tokens,
        servable_tokens=tokens,
        expected_tokens=tokens,
        summary=f"{tokens:,} of {tokens:,} tokens served from the offload tier",
        lookups=[_lookup(base.arrival_time + 0.01, tokens + 76, chunks, served=True)],
        loads=[
            Load(
                job_id=index,
                time=base.arrival_time + 0.02,
                groups=[
                    GroupChunks(kv_group=0, loaded=chunks),
                    GroupChunks(kv_group=1, loaded=1),
                    GroupChunks(kv_group=2, loaded=1),
                ],
                completed_at=base.arrival_time + 0.06,
                latency=0.04,
                bytes=10_485_760,
                transfer_seconds=0.012,
            )
        ],
    )


def cold_record(
    index: int, info: EngineInfo | None = None, *, chunks: int = 2, finish: float | None = None
) -> RequestRecord:
    """A prompt never seen before: nothing to serve, everything stored."""
    base = _base(index, info or engine(), finish)
    miss = Lookup(
        time=base.arrival_time + 0.01,
        seconds=24e-6,
        local_tokens=0,
        num_tokens=chunks * CHUNK + 76,
        attempt=1,
        exit="miss",
        result=0,
        groups=[
            GroupLookup(
                kv_group=0,
                group_kind="full_attention",
                tokens_per_chunk=CHUNK,
                width=chunks,
                raw_hits=0,
                pass_number=1,
            )
        ],
    )
    return msgspec.structs.replace(
        base,
        prompt_tokens=chunks * CHUNK + 76,
        summary="Nothing of this prompt had been computed before",
        lookups=[miss],
        stores=[_store(base.finish_time - 0.1, stored=chunks)],
    )


def _store(at: float, *, stored: int = 0, already: int = 0) -> Store:
    return Store(
        time=at,
        job_id=1 if stored else None,
        groups=[
            GroupChunks(kv_group=index, offered=stored + already, stored=stored, already=already)
            for index in range(len(KINDS))
        ],
        completed_at=at + 0.05 if stored else None,
        bytes=stored * 3 * 1_048_576 if stored else None,
    )


def batch(info: EngineInfo, records: Sequence[RequestRecord], *events: tuple[str, float]) -> Batch:
    newest = max([info.started_at, *(record.finish_time for record in records)])
    return Batch(
        [(info, newest)],
        [EngineEvent(info.incarnation_id, state, at) for state, at in events],
        [RecordRow(record, pack(encode(record))) for record in records],
    )
