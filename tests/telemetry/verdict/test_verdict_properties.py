"""What holds for every judgement."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_cases import Chunks, R, case, group

from kvlens.telemetry.semconv import Confidence, Exit, Verdict
from kvlens.telemetry.state.residency import State
from kvlens.telemetry.verdict.judge import Case, judge

KINDS = st.sampled_from(["full_attention", "sliding_window", "chunked_local", "mamba"])


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    groups = []
    for i in range(draw(st.integers(1, 4))):
        new = group(i, draw(KINDS), draw(st.sampled_from([1, 2, 4, 8, 16])))
        new.drafter_used = draw(st.booleans())
        new.drafter = new.drafter_used and draw(st.booleans())
        new.window = draw(st.integers(1, 20)) if new.group_kind == "sliding_window" else None
        if new.group_kind == "chunked_local":
            new.attention_chunk = draw(st.integers(1, 20))
        groups.append(new)
    tokens = draw(st.integers(2, 120))
    odd, rng = draw(st.sampled_from(State)), draw(st.randoms(use_true_random=False))
    density = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    chunks: Chunks = {
        g.kv_group: {
            k: R if rng.random() < density else odd for k in range(tokens // g.tokens_per_chunk)
        }
        for g in groups
    }
    return case(
        groups, tokens, chunks, local=draw(st.integers(0, tokens)), widens=draw(st.booleans()),
        load_window=draw(st.booleans()), capacity_chunks=draw(st.none() | st.integers(1, 200)),
        exit=draw(st.none() | st.sampled_from(Exit)), residency_known=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(any_case())
def test_whatever_comes_the_numbers_and_the_words_agree(found):
    said = judge(found)
    assert said.cause is (said.causes[0] if said.causes else None)
    assert said.lost == 0 or said.cause is not None, "lost tokens are counted by cause"
    assert said.lost <= max(0, found.target - found.served)
    assert bool(said.next_step) == (said.cause is not None)
    assert said.summary.endswith(".")
    assert not said.summary[0].islower()
    if said.cause and said.verdict is not Verdict.UNSAFE:  # which follows from the boundary alone
        assert said.confidence is not Confidence.CERTAIN or found.residency_known
    if said.verdict is Verdict.LOST:
        assert found.served == 0 < said.lost
    if said.verdict is Verdict.PARTIAL:
        assert found.served > 0 < said.lost
