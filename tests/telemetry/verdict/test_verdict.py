"""Cases from the field: what must be said of each, and what must stay silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verdict_cases import DRAFTER, C, Chunks, E, P, R, case, full, group, mamba, run, sliding

from kvlens.telemetry.records import GroupLookup
from kvlens.telemetry.semconv import QUIET_VERDICTS, Cause, Confidence, Exit, Verdict
from kvlens.telemetry.state.residency import State
from kvlens.telemetry.verdict.advice import next_step
from kvlens.telemetry.verdict.judge import UnsafeState, judge

# --- something is wrong -------------------------------------------------------

F1 = [
    full(0, 2128, drafter_used=True),
    *[mamba(i, 2128, drafter_used=True) for i in (1, 2, 3)],
]


@pytest.mark.parametrize(
    ("stored", "served", "verdict"),
    [(1, 0, Verdict.LOST), (2, 1, Verdict.PARTIAL), (3, 2, Verdict.PARTIAL),
     (17, 16, Verdict.PARTIAL)],
)  # fmt: skip
def test_f1_every_group_treated_as_drafter(stored, served, verdict):
    found = case(
        F1, stored * 2128 + 100, {i: run(stored) for i in range(4)}, widens=False,
        load_window=False, vetoing_group=0, exit=Exit.SERVED if served else Exit.POPPED_OUT,
    )  # fmt: skip
    assert (found.served, found.servable) == (served * 2128, stored * 2128)
    said = judge(found)
    assert (said.verdict, said.cause, said.confidence) == (
        verdict, Cause.DRAFTER_FALLBACK, Confidence.CERTAIN,
    )  # fmt: skip
    assert said.causes == [Cause.DRAFTER_FALLBACK]
    assert said.evidence["drafter_groups_used"] == [0, 1, 2, 3]
    assert said.evidence["drafter_groups_annotated"] == []
    assert said.evidence["boundary_with_annotated_drafters"] == stored * 2128
    assert said.lost == said.lost_at_lookup == 2128
    assert "all 4 groups were treated as drafter groups" in said.summary
    assert "0.30.0" in said.next_step


def test_f2_gaps_in_the_stored_range():
    chunks = run(120)
    for gap in (31, 63, 95):
        chunks[gap] = C
    found = case([full(0, 256, **DRAFTER)], 31_000, {0: chunks}, exit=Exit.SERVED)
    assert found.served == found.servable == 7680
    said = judge(found)
    assert (said.verdict, said.cause, said.vetoing_group) == (Verdict.PARTIAL, Cause.STORE_GAP, 0)
    assert said.evidence["first_gap_chunk"] == 31
    assert said.evidence["gap_chunks"] == [31, 63, 95]
    assert said.lost_at_lookup == 0
    assert said.lost_at_store == found.expected - 7680
    assert "chunks 31, 63, 95" in said.summary
    assert "chunk 31 of kv_group 0" in said.next_step


@pytest.mark.parametrize("widens", [False, True])
def test_f3_one_stored_chunk_of_a_drafter_is_cold(widens):
    found = case(
        [full(0, 256, **DRAFTER)], 1000, {0: run(1)}, widens=widens, exit=Exit.POPPED_OUT,
        vetoing_group=0,
    )  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause, said.lost) == (Verdict.COLD, None, 0)
    assert "volatile last chunk" in said.summary


def test_f3_where_a_wider_query_would_have_served_it():
    # the state limits the query to one chunk, though the next one is resident
    found = case(
        [full(0, 256, **DRAFTER), mamba(1, 256)], 512, {0: run(2), 1: run(1)}, widens=False,
        exit=Exit.POPPED_OUT, vetoing_group=0,
    )  # fmt: skip
    assert (found.served, found.servable) == (0, 256)
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.LOST, Cause.POP_WITHOUT_WIDENING)


def test_f4_the_writer_keeps_one_chunk_less_than_the_reader_needs():
    groups = [
        full(0, 256),
        *[sliding(i, 256, 512) for i in (1, 2, 3)],
        sliding(4, 256, 512, **DRAFTER),
    ]
    chunks: Chunks = {i: run(20) for i in range(4)}
    chunks[4] = run(20, C) | run(2, start=18)
    found = case(groups, 20 * 256 + 9, chunks, exit=Exit.VETOED, vetoing_group=4)
    assert (found.served, found.servable) == (0, 0)
    said = judge(found)
    assert (said.verdict, said.cause, said.vetoing_group) == (Verdict.LOST, Cause.WINDOW_VETO, 4)
    assert said.evidence["window_kept_chunks"] == 2
    assert said.evidence["window_needed_chunks"] == 3
    assert said.lost_at_store == found.expected == 19 * 256
    assert "kept 2 of the 3 chunks" in said.summary


def test_f5_a_ring_buffer_joins_the_lookup():
    groups = [*[full(i, 816) for i in range(3)], sliding(3, 816, 4)]
    chunks: Chunks = {i: run(104) for i in range(3)}
    chunks[3] = run(104, C)
    said = judge(case(groups, 104 * 816 + 5, chunks, exit=Exit.VETOED, vetoing_group=3))
    assert (said.verdict, said.cause, said.vetoing_group) == (Verdict.LOST, Cause.WINDOW_VETO, 3)
    assert said.evidence["window_kept_chunks"] == 0
    assert said.evidence["window_tokens"] == 4
    assert said.lost == 104 * 816


F6 = [full(0, 12_288), mamba(1, 1536)]


def test_f6_no_prompt_below_the_coarsest_chunk_can_be_served():
    said = judge(case(F6, 10_000, {1: run(6)}, exit=Exit.COVERED))
    assert (said.verdict, said.cause, said.lost) == (Verdict.COLD, Cause.CHUNK_GRANULARITY, 0)
    assert said.evidence == {"largest_chunk_tokens": 12_288, "prompt_tokens": 10_000}
    assert "12,288" in said.next_step
    longer = judge(case(F6, 13_000, {0: run(1), 1: run(8)}, exit=Exit.SERVED))
    assert (longer.verdict, longer.lost) == (Verdict.FULL, 0)


def test_f7_the_pop_falls_below_the_coarser_groups_chunk():
    found = case(
        [full(0, 16, **DRAFTER), mamba(1, 64)], 81, {0: run(5), 1: run(1)}, widens=False,
        load_window=False, exit=Exit.POPPED_OUT, vetoing_group=0,
    )  # fmt: skip
    assert (found.served, found.servable) == (0, 64)
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.LOST, Cause.POP_WITHOUT_WIDENING)
    assert said.confidence is Confidence.CERTAIN
    assert said.evidence["boundary_with_wider_query"] == 64
    assert said.lost == 64


def test_two_changes_that_each_help_are_both_listed():
    found = case(
        [full(0, 16, drafter_used=True), mamba(1, 64)], 81, {0: run(5), 1: run(1)}, widens=False,
        load_window=False, exit=Exit.POPPED_OUT, vetoing_group=0,
    )  # fmt: skip
    said = judge(found)
    assert said.causes == [Cause.DRAFTER_FALLBACK, Cause.POP_WITHOUT_WIDENING]
    assert "pop_without_widening explains it as well: either change alone" in said.summary


def test_two_changes_that_help_together_only_are_both_listed():
    groups = [full(0, 16, **DRAFTER), mamba(1, 64, drafter_used=True)]
    found = case(
        groups, 81, {0: run(5), 1: run(1)}, widens=False, load_window=False,
        exit=Exit.POPPED_OUT, vetoing_group=0,
    )  # fmt: skip
    said = judge(found)
    assert said.causes == [Cause.DRAFTER_FALLBACK, Cause.POP_WITHOUT_WIDENING]
    assert said.evidence["boundary_with_annotated_drafters"] == 0
    assert said.evidence["boundary_with_wider_query"] == 0
    assert said.evidence["boundary_with_both"] == 64
    assert "only both changes together would have served more" in said.summary


def test_f8_evicted_before_it_came_back():
    groups = [full(0, 2176), *[mamba(i, 2176) for i in range(1, 9)]]
    found = case(groups, 23_500, {i: run(10, E) for i in range(9)}, exit=Exit.MISS,
                 capacity_chunks=293)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause, said.lost) == (Verdict.EVICTED, Cause.CAPACITY, 0)
    assert said.evidence["slots_needed"] == 90
    assert said.evidence["capacity_chunks"] == 293
    assert said.evidence["evicted_tokens"] == 21_760
    assert "293" in said.next_step


@pytest.mark.parametrize(
    ("state", "verdict"), [(E, Verdict.EVICTED), (State.REFUSED, Verdict.UNSTORED)]
)
def test_what_lower_tiers_held_is_not_known_for_certain(state, verdict):
    found = case([full(0, 512)], 10 * 512, {0: run(10, state)}, exit=Exit.MISS)
    assert (judge(found).verdict, judge(found).confidence) == (verdict, Confidence.CERTAIN)
    tiered = judge(replace(found, lower_tiers=True))
    assert (tiered.verdict, tiered.confidence) == (verdict, Confidence.LIKELY)


def test_lower_tiers_do_not_matter_where_all_chunks_are_in_the_first():
    found = case(
        F1, 2228, {i: run(1) for i in range(4)}, widens=False, load_window=False, vetoing_group=0,
        exit=Exit.POPPED_OUT, lower_tiers=True,
    )  # fmt: skip
    said = judge(found)
    assert (said.cause, said.confidence) == (Cause.DRAFTER_FALLBACK, Confidence.CERTAIN)


def test_partly_evicted_prompt_is_evicted_though_the_rest_was_served():
    found = case([full(0, 512)], 4100, {0: run(2) | run(6, E, 2)}, exit=Exit.SERVED)
    said = judge(found)
    assert (said.verdict, said.lost) == (Verdict.EVICTED, 0)
    assert said.summary.startswith("1,024 tokens were served, but 3,072 more")


def test_f9_prompt_needs_more_slots_than_the_tier_has():
    found = case(
        [full(0, 512)], 75 * 512, {0: run(75, State.REFUSED)}, exit=Exit.MISS, capacity_chunks=43
    )
    said = judge(found)
    assert said.cause is Cause.CAPACITY
    assert (said.evidence["slots_needed"], said.evidence["capacity_chunks"]) == (75, 43)
    assert said.verdict is Verdict.UNSTORED
    assert "needs 75 slots and the tier has 43" in said.summary
    roomy = judge(replace(found, capacity_chunks=4300))
    assert (roomy.verdict, roomy.cause) == (Verdict.UNSTORED, Cause.ALLOCATION_FAILURE)


def test_f10_write_that_never_completes():
    found = case(
        [full(0, 512)], 5000, {0: run(7) | {7: P}}, served=0, exit=None, unresolved=True,
        deferral_seconds=300.0, deferrals=1_270_000, deferred_exit=Exit.DEFERRED_BACKEND,
    )  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.STALLED, Cause.PENDING_STORE)
    assert said.evidence["first_pending_chunk"] == 7
    assert "300.0 s (1,270,000 lookups)" in said.summary


def test_f11_retry_that_never_ends():
    found = case(
        [full(0, 512)], 112 * 512, {0: run(112)}, served=0, exit=None, deferral_seconds=240.0,
        deferrals=36_137, deferred_exit=Exit.DEFERRED_BACKEND, unresolved=True,
    )  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.STALLED, Cause.RETRY_STALL)
    assert said.evidence["resident_chunks"] == 112
    assert said.lost_at_lookup == 112 * 512


@pytest.mark.parametrize(
    ("exit_", "cause"),
    [(Exit.DEFERRED_TRANSFER, Cause.PENDING_STORE), (Exit.DEFERRED_LOADING, Cause.RETRY_STALL)],
)
def test_other_stalls_name_the_likely_cause(exit_, cause):
    found = case([full(0, 512)], 1100, {0: run(2)}, exit=Exit.SERVED, deferral_seconds=12.0,
                 deferrals=3, deferred_exit=exit_)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause, said.confidence) == (
        Verdict.STALLED, cause, Confidence.LIKELY,
    )  # fmt: skip


def test_f12_state_that_contains_the_last_token():
    found = case([full(0, 1408), mamba(1, 1408)], 2816, {0: run(2), 1: run(2)}, served=2816,
                 exit=Exit.SERVED)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause, said.vetoing_group) == (
        Verdict.UNSAFE, Cause.MISALIGNED_STATE, 1,
    )  # fmt: skip
    assert (said.evidence["boundary"], said.evidence["state_tokens"]) == (2816, 2816)
    assert said.evidence["tokens_past_boundary"] == 1
    known = judge(replace(found, served=2815, unsafe=UnsafeState(1, 1, 2816)))
    assert known.evidence["boundary"] == 2815
    assert "1 too many" in known.summary


def test_f13_attention_stops_short_of_the_state():
    found = case([full(0, 16), mamba(1, 64)], 300, {0: run(11), 1: run(4)}, exit=Exit.SERVED)
    assert (found.served, found.servable) == (176, 128)
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.UNSAFE, Cause.MISALIGNED_STATE)
    assert (said.evidence["boundary"], said.evidence["state_tokens"]) == (176, 192)
    assert (said.evidence["state_chunk"], said.lost_at_lookup) == (2, 0)


def test_f14_stored_chunk_with_an_unwritten_slot():
    found = case([full(0, 16)], 160, {0: run(5)}, exit=Exit.SERVED, unwritten=(0, 9),
                 offload_prompt_only=False)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.UNSAFE, Cause.UNWRITTEN_SLOT)
    assert said.evidence["unwritten_token"] == 160
    assert said.evidence["verdict_otherwise"] == "full"


def test_f15_last_chunk_held_back_and_never_released():
    found = case(
        [full(0, 16, **DRAFTER)], 200, {0: run(9) | {9: State.HELD_BACK}}, exit=Exit.SERVED
    )
    assert (found.served, found.expected) == (128, 144)
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.UNSTORED, Cause.TAIL_HELD_BACK)
    assert said.evidence["missing_by_state"] == {"held_back": 1}
    assert (said.lost_at_store, said.lost_at_lookup) == (16, 0)
    assert "never offered" in said.summary


def test_f17_restart_with_other_hashes():
    query = GroupLookup(kv_group=0, group_kind="full_attention", tokens_per_chunk=16, width=5748,
                        raw_hits=0, pass_number=1)  # fmt: skip
    found = case([full(0, 16)], 91_970, {}, exit=Exit.MISS, lookups=[query], persistent_tier=True,
                 hash_seed_fixed=False)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause) == (Verdict.COLD, Cause.HASH_SEED)
    assert said.evidence == {"probes": 5748, "hits": 0}
    assert "PYTHONHASHSEED" in said.next_step
    assert judge(replace(found, hash_seed_fixed=True)).cause is None


def test_f20_a_drafter_window_lowers_the_boundary_between_states():
    groups = [
        full(0, 3584), full(1, 4), *[mamba(i, 3584) for i in range(2, 6)],
        sliding(6, 64, 64, **DRAFTER),
    ]  # fmt: skip
    every: Chunks = {g.kv_group: run(7178 // g.tokens_per_chunk) for g in groups}
    found = case(groups, 7178, every, exit=Exit.SERVED)
    assert (found.served, found.servable) == (7104, 3584)
    said = judge(found)
    assert (said.verdict, said.evidence["boundary"]) == (Verdict.UNSAFE, 7104)
    assert said.evidence["state_tokens"] == 7168


# --- nothing is wrong ---------------------------------------------------------

QUIET = {
    "N2": (case([full(0, 2112), mamba(1, 2112)], 10_560, {0: run(5), 1: run(5)},
                exit=Exit.SERVED), Verdict.FULL),
    "N4": (case([full(0, 512)], 2000, {}, exit=Exit.MISS), Verdict.COLD),
    "N5": (case([full(0, 512), mamba(1, 512)], 2000, {}, exit=Exit.MISS), Verdict.COLD),
    "N9": (case([full(0, 512)], 1100, {0: run(2)}, local=1008, exit=Exit.COVERED), Verdict.LOCAL),
    "GPU covers it": (case([full(0, 512)], 1100, {0: run(2)}, local=1088, exit=Exit.COVERED),
                      Verdict.LOCAL),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_wrong(name):
    found, verdict = QUIET[name]
    said = judge(found)
    assert said.verdict is verdict
    assert said.verdict in QUIET_VERDICTS
    assert said.lost < found.layout.largest_chunk


def test_n2_serves_four_of_five_chunks_and_n9_leaves_sixteen_tokens():
    assert QUIET["N2"][0].served == 8448
    said = judge(QUIET["N9"][0])
    assert (said.servable, said.lost, said.cause) == (16, 16, Cause.CHUNK_GRANULARITY)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"skip_reading": True}, "skip_reading_prefix_cache"),  # N6
        ({"exit": Exit.SKIPPED}, "skip_reading_prefix_cache"),
        ({"exit": Exit.OTHER_CONNECTOR}, "Another connector"),  # N10
        ({"other_connector": True}, "Another connector"),
        ({"exit": Exit.NOT_ADMITTED}, "before the scheduler admitted it"),
        ({"exit": Exit.SERVED}, "before the scheduler admitted it"),
        ({"unresolved": True, "deferral_seconds": 0.2}, "after waiting 0.20 s"),
    ],
)
def test_requests_that_did_not_read_lose_nothing(fields, words):
    found = case([full(0, 512)], 1100, {0: run(2)}, served=0, **fields)
    said = judge(found)
    assert found.servable == 1024
    assert (said.verdict, said.cause) == (Verdict.SKIPPED, None)
    assert (said.lost, said.servable, said.expected) == (0, 0, 0)
    assert words in said.summary


# --- what is not known, and what policy does -----------------------------------


def test_unknown_residency_is_never_certain():
    f8 = case([full(0, 512)], 2100, {0: run(4, E)}, exit=Exit.MISS, residency_known=False)
    assert judge(f8).confidence is Confidence.LIKELY
    lost = case([full(0, 512)], 2100, {0: run(4, State.UNKNOWN)}, exit=Exit.MISS,
                residency_known=False)  # fmt: skip
    said = judge(lost)
    assert (said.cause, said.confidence, said.lost) == (
        Cause.NOT_ATTRIBUTABLE, Confidence.GUESS, 0,
    )  # fmt: skip


def test_loss_that_no_change_explains_is_not_attributed():
    found = case([full(0, 512)], 2100, {0: run(4)}, served=0, exit=Exit.MISS)
    said = judge(found)
    assert (said.verdict, said.cause, said.confidence) == (
        Verdict.LOST, Cause.NOT_ATTRIBUTABLE, Confidence.GUESS,
    )  # fmt: skip
    assert said.evidence["replayed_boundary"] == 2048


def test_search_that_asks_for_more_than_a_window_needs():
    # W = 1 mod chunk: what is needed is resident, the search wants one chunk more
    groups = [full(0, 64), sliding(1, 64, 65)]
    found = case(groups, 193, {0: run(3), 1: {2: R}}, load_window=False, exit=Exit.VETOED,
                 vetoing_group=1)  # fmt: skip
    assert found.servable == 192
    said = judge(found)
    assert said.cause is Cause.WINDOW_VETO
    assert "the search asks for more" in said.summary
    assert "(65 tokens)" in said.next_step


def test_search_that_is_not_exact_for_mixed_chunks():
    sizes = ((8, 10), (16, 5), (4, 16))
    groups = [group(i, "chunked_local", c, attention_chunk=a) for i, (c, a) in enumerate(sizes)]
    found = case(groups, 21, {i: run(21 // c) for i, (c, _) in enumerate(sizes)}, exit=Exit.SERVED)
    assert (found.served, found.servable) == (16, 20)
    said = judge(found)
    assert (said.verdict, said.cause, said.confidence) == (
        Verdict.PARTIAL, Cause.CHUNK_GRANULARITY, Confidence.CERTAIN,
    )  # fmt: skip
    assert said.evidence["chunk_tokens"] == [4, 8, 16]


def test_policy_explains_what_it_excludes():
    found = case([full(0, 512)], 2100, {0: run(4, State.EXCLUDED)}, exit=Exit.MISS,
                 store_threshold=2)  # fmt: skip
    said = judge(found)
    assert (said.verdict, said.cause, said.lost) == (Verdict.UNSTORED, Cause.POLICY, 0)
    assert "store_threshold is 2" in said.next_step


def test_both_losses_are_told_the_larger_first():
    groups = [full(0, 16, drafter_used=True), mamba(1, 16, drafter_used=True)]
    chunks = {0: run(3) | {3: C} | run(16, start=4), 1: run(20)}
    found = case(groups, 330, chunks, widens=False, exit=Exit.SERVED)
    assert (found.served, found.servable, found.expected) == (32, 48, 320)
    said = judge(found)
    assert said.causes == [Cause.STORE_GAP, Cause.DRAFTER_FALLBACK]
    assert "chunk 3), so that the 16" in said.summary
    assert "16 more were there and not served: all 2 groups were treated as drafter" in said.summary
    assert (said.lost_at_lookup, said.lost_at_store) == (16, 272)
    assert said.verdict is Verdict.PARTIAL


def test_recurrent_states_that_were_never_materialised_are_not_expected():
    groups = [full(0, 512), mamba(1, 512)]
    said = judge(case(groups, 2100, {0: run(4), 1: {1: R, 3: C}}, exit=Exit.SERVED, served=1024))
    assert (said.verdict, said.expected) == (Verdict.FULL, 1024)


def test_store_in_flight():
    found = case([full(0, 512)], 2100, {0: run(4, P)}, exit=Exit.MISS)
    said = judge(found)
    assert (said.cause, said.evidence["missing_by_state"]) == (Cause.PENDING_STORE, {"pending": 4})


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_next_step_without_braces(cause):
    text = next_step(cause, {"slots": 3, "largest_chunk": 16})
    assert text.endswith(".")
    assert "{{" not in text
    assert len(text) > 40
