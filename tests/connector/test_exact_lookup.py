"""Exact and corrected lookups on the cases that the field reported, and when they must wait."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from brute_force import allocate, expected, problems, run, stock_kind
from lookup_cases import HIT, MISS, PENDING, RETRY, Case, Group

from kvlens.connector import compat
from kvlens.connector.observer import Observer


def full(block, **more):
    return Group("full_attention", block, **more)


def state(block):
    return Group("mamba", block)


def window(block, tokens, **more):
    return Group("sliding_window", block, window=tokens, **more)


def case(groups, tokens, *, missing=(), **more):
    """Everything stored but ``missing``, pairs of group and chunk."""
    stored = {
        (index, chunk): HIT
        for index, group in enumerate(groups)
        for chunk in range(tokens // group.block)
        if (index, chunk) not in missing
    }
    more = {"blocks_per_chunk": 1, "local": 0, **more}
    drop = any(group.drafter for group in groups)
    return Case(tuple(groups), tokens=tokens, stored=stored, block_drop=drop, **more)


def served(the_case, mode):
    result = run(the_case, mode)
    if result.answer:
        allocate(result)
    return result.answer


# F13: attention resident to token 176, states resident: no state exists at 176.
F13 = case([full(16), state(64)], 300, missing=[(0, chunk) for chunk in range(11, 18)])


def test_no_boundary_without_a_state():
    assert run(F13, "stock").answer == 176
    assert stock_kind(F13) == "unsafe"
    assert served(F13, "corrected") == served(F13, "exact") == 128


# F20: a layout from the field; a drafter's chunk to pop exists only below 2 x 3584.
F20_GROUPS = [full(3584), full(4), *[state(3584)] * 4, window(64, 64, drafter=True)]


@pytest.mark.parametrize("tokens", [7171, 7178, 7231])
def test_a_drafters_pop_leaves_the_recurrent_groups_a_state(tokens):
    the_case = case(F20_GROUPS, tokens)
    assert run(the_case, "stock").answer == 7104
    assert served(the_case, "corrected") == served(the_case, "exact") == 3584


def test_one_chunk_more_to_pop_serves_both():
    the_case = case(F20_GROUPS, 7168 + 64)
    assert served(the_case, "corrected") == served(the_case, "exact") == 7168


# N2: the last token is computed anew, so an exact multiple of the state's chunk loses one.
@pytest.mark.parametrize(("tokens", "boundary"), [(10560, 8448), (10561, 10560), (2112, 0)])
def test_the_last_token_is_left_to_compute(tokens, boundary):
    assert served(case([full(2112), state(2112)], tokens), "exact") == boundary


def test_full_attention_alone_may_serve_every_token():
    assert served(case([full(16)], 64), "exact") == 64


def test_a_window_one_token_longer_than_a_chunk_needs_no_second_one():
    the_case = case([full(64), window(64, 65)], 129, missing=[(1, 0)])
    assert run(the_case, "stock").answer == 0
    assert served(the_case, "exact") == 128


def test_a_remainder_below_a_chunk_is_served():
    the_case = case([full(16), window(512, 512)], 1100, local=1008 - 1008 % 512)
    assert served(the_case, "exact") == 1024 - 512


def test_a_local_prefix_that_ends_inside_a_block_is_left_alone():
    the_case = case([full(16), state(64)], 300)
    assert run(replace(the_case, local=72), "exact").answer == 0
    assert run(replace(the_case, local=72), "corrected").answer == 0


# Deferral: only if what is awaited can change the answer.
def with_results(the_case, results):
    return replace(the_case, stored={**the_case.stored, **results})


@pytest.mark.parametrize("result", [PENDING, RETRY])
@pytest.mark.parametrize("awaited", [(0, 3), (1, 3)])
def test_waits_for_a_chunk_that_the_best_boundary_needs(awaited, result):
    the_case = case([full(16), state(64)], 300)
    assert run(with_results(the_case, {awaited: result}), "exact").answer is None


def test_does_not_wait_for_a_chunk_that_changes_nothing():
    the_case = case([full(16), state(64)], 300, missing=[(0, 9)])
    for awaited in ((0, 8), (0, 12), (1, 0), (1, 3)):
        assert run(with_results(the_case, {awaited: RETRY}), "exact").answer == 128


def test_asks_below_while_it_waits_for_a_chunk_to_be_located():
    the_case = with_results(case([full(16), window(16, 32)], 300), {(1, 17): RETRY})
    result = run(the_case, "exact")
    assert result.answer is None
    keys = result.scheduler._req_status["request"].group_states[1].offload_keys
    assert [chunk for chunk, key in enumerate(keys) if key in result.manager.asked] == [15, 16, 17]


def test_waits_while_another_request_loads_a_chunk_that_it_needs():
    the_case = case([full(16), state(64)], 300)
    for loading, waits in (((0, 2), True), ((1, 3), True), ((1, 2), False), ((0, 17), False)):
        answer = run(replace(the_case, being_loaded=frozenset([loading])), "exact").answer
        assert (answer is None) == waits


def test_a_hit_that_its_own_promotion_evicted_is_not_served():
    """Asking for chunk 17, which is not needed in the end, made a tiered manager evict chunk 0."""
    groups = [full(16), window(16, 16)]
    result = run(with_results(case(groups, 300, missing=[(1, 17)]), {(0, 17): RETRY}), "exact")
    assert result.answer == 272
    keys = result.scheduler._req_status["request"].group_states[0].offload_keys
    left = {key: answer for key, answer in result.manager.answers.items() if key != keys[0]}
    result.manager.primary_tier = SimpleNamespace(lookup=lambda key, context: left.get(key, MISS))
    assert result.scheduler.get_num_new_matched_tokens(result.request, 0)[0] is None
    left[keys[0]] = HIT
    assert result.scheduler.get_num_new_matched_tokens(result.request, 0)[0] == 272


# Partial last blocks.
TAILED = replace(
    case([full(32), state(32)], 150, missing=[(1, chunk) for chunk in range(5)]),
    tails={(group, tokens): HIT for group in (0, 1) for tokens in (76, 140)},
)


@pytest.mark.skipif(not compat.loads_partial_tail(), reason="this vLLM has no partial tails")
def test_a_missing_state_does_not_hide_a_partial_last_block():
    assert served(TAILED, "exact") == 140
    # From 0.34 on vLLM's own search looks there, too.
    assert served(TAILED, "stock") == (140 if compat.TELLS_ATTENTION else 0)
    assert served(replace(TAILED, tails={**TAILED.tails, (1, 140): RETRY}), "exact") is None
    assert served(replace(TAILED, tails={(0, 140): HIT, (1, 76): HIT, (0, 76): HIT}), "exact") == 76


def test_what_was_asked_is_noted_as_vllms_own_search_would_have_asked_it():
    result = run(F13, "exact")
    observer = result.scheduler.observer = Observer(SimpleNamespace(append=lambda fact: None))
    status = result.scheduler._req_status["request"]
    assert compat.hit_tokens(getattr(result.scheduler, compat.SEARCH)(status)) == 128
    keys = [state.offload_keys for state in status.group_states]
    # Attention up to its first gap at chunk 11; of the states, the one after 128 tokens.
    assert observer.queries == [(keys[0][:12], 11, None), (keys[1][:2], 2, 1)]


@pytest.mark.parametrize("the_case", [F13, case(F20_GROUPS, 7178), TAILED])
def test_the_definition_agrees(the_case):
    assert problems(the_case) == []
    assert expected(the_case) == run(the_case, "exact").answer
