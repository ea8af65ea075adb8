"""Random layouts, residency and limits, for tests of the oracle."""

from __future__ import annotations

from hypothesis import strategies as st

from kvlens.telemetry.records import GroupLayout, Layout

CHUNKS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


def group(kv_group: int, kind: str, chunk: int, **fields) -> GroupLayout:
    return GroupLayout(
        kv_group=kv_group, group_kind=kind, tokens_per_block=chunk, tokens_per_chunk=chunk, **fields
    )


def layout(*groups: GroupLayout, **fields) -> Layout:
    return Layout(groups=list(groups), tokens_per_hash=1, **fields)


@st.composite
def groups(draw: st.DrawFn, kv_group: int) -> GroupLayout:
    kind = draw(st.sampled_from(["full_attention", "sliding_window", "chunked_local", "mamba"]))
    fields = {"drafter": draw(st.booleans())}
    if kind == "sliding_window":
        fields["window"] = draw(st.integers(1, 20))
        fields["extra_retained"] = draw(st.integers(0, 4))
    if kind == "chunked_local":
        fields["attention_chunk"] = draw(st.integers(1, 20))
    return group(kv_group, kind, draw(CHUNKS), **fields)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, set[tuple[int, int]], int, int, int | None]:
    found = layout(*[draw(groups(i)) for i in range(draw(st.integers(1, 4)))])
    tokens = draw(st.integers(1, 60))
    missing = draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=8))
    local = draw(st.integers(0, tokens))
    cap = draw(st.none() | st.integers(0, 60))
    return found, missing, local, tokens, cap
