"""What reaches a verdict from the facts alone: caps, tiers, hash seeds and unwritten slots."""

import pytest
from hypothesis import given, settings
from oracle_cases import cases
from recording import Engine, Kept, Numbers, engine

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly.assembler import Assembler
from kvlens.telemetry.assembly.emission import Emitter
from kvlens.telemetry.assembly.open_request import Answer, OpenRequest
from kvlens.telemetry.records import GroupLayout, Layout, Lookup
from kvlens.telemetry.state.residency import Residency, State
from kvlens.telemetry.verdict.case import expected_boundary
from kvlens.telemetry.verdict.oracle import is_servable, servable_boundary


def attention_only() -> Layout:
    """One full-attention group with chunks of 16 tokens."""
    group = GroupLayout(
        kv_group=0, group_kind="full_attention", tokens_per_block=16, tokens_per_chunk=16
    )
    return Layout(groups=[group], tokens_per_hash=16)


def weighed(found: Layout, residency: Residency, fact: facts.LookedUp) -> Answer:
    """The answer to ``fact`` with its servable and expected tokens."""
    info = engine(layout=found)
    emitter = Emitter(info, Numbers(), [Kept()], residency, lambda ns: ns / 1e9, 1.0)
    lookup = Lookup(time=0, seconds=0, local_tokens=fact.local_tokens, num_tokens=fact.num_tokens,
                    attempt=1, exit="served", result=fact.result)  # fmt: skip
    answer = Answer(fact, lookup)
    added = facts.Added(0, "r", 0.0, fact.num_tokens, None, False, None)
    emitter.weigh(answer, OpenRequest(added))
    return answer


@settings(max_examples=200, deadline=None)
@given(cases())
def test_what_was_served_need_not_be_scanned_again(case):
    found, missing, local, tokens, cap = case
    keys = [
        [f"{k}".encode() + g.kv_group.to_bytes(4, "big") for k in range(60 // g.tokens_per_chunk)]
        for g in found.groups
    ]
    residency = Residency()
    for group, names in zip(found.groups, keys, strict=True):
        del names[tokens // group.tokens_per_chunk :]
        there = [key for k, key in enumerate(names) if (group.kv_group, k) not in missing]
        residency.offered(there, set(there), [])
        residency.stored(there, success=True)
        residency.computed(names, State.COMPUTED)

    def state(kv_group, chunk):
        return residency.state(keys[kv_group][chunk])

    def holds(kv_group, chunk):
        return state(kv_group, chunk) is State.RESIDENT

    every = range(local + 1, tokens + 1)
    safe = [b for b in every if is_servable(found, holds, local, tokens, b, cap)]
    for result in [0, *(b - local for b in safe[:: max(1, len(safe) // 3)])]:
        pairs = [(names, len(names)) for names in keys]
        fact = facts.LookedUp(0, "r", 0, local, tokens, result, [], pairs, False, None, cap)
        answer = weighed(found, residency, fact)
        assert answer.servable == servable_boundary(found, holds, local, tokens, cap=cap) - local
        assert answer.expected == expected_boundary(found, state, local, tokens, cap) - local


def test_a_request_that_was_served_in_full_costs_no_scan(monkeypatch):
    run = Engine()
    run.serve_cold("a", "doc", 16_000)
    looked = []
    real = Residency.state
    monkeypatch.setattr(Residency, "state", lambda self, key: looked.append(key) or real(self, key))
    run.add("b", 16_000)
    run.look("b", "doc", 16_000, 15_936, [(0, 1000, 996), (1, 249, 249)])
    assert len(looked) < 16


def test_a_stored_chunk_with_an_unwritten_slot_is_unsafe_whatever_was_served():
    """F14: 33 + 15 tokens; the KV of the last one was never computed."""
    run = Engine(engine(offload_prompt_only=False, layout=attention_only()))
    run.serve_cold("other", "doc", 33)
    run.add("a", 33)
    run.look("a", "doc", 33, 32, [(0, 2, 2)])
    run.admit("a", 32)
    run.finish("a", "doc", 48, computed=47)
    third = run.keys("doc", 48)[0][2:]
    run.store("a", third, third)
    record = run.settle()[-1]
    assert (record.verdict, record.cause) == ("unsafe", "unwritten_slot")
    assert record.evidence["unwritten_token"] == 48
    assert record.evidence["verdict_otherwise"] == "full"
    assert record.served_tokens == record.servable_tokens == 32
    assert "offload_prompt_only" in record.next_step
    assert run.numbers.counters[semconv.REQUESTS.name, ("unsafe",)] == 1


@pytest.mark.parametrize("tokens", [49, 64])
def test_a_chunk_whose_slots_were_all_written_is_no_finding(tokens):
    run = Engine(engine(offload_prompt_only=False))
    run.add("a", 33)
    run.look("a", "doc", 33, 0, [(0, 2, 0)])
    run.admit("a", 0)
    run.finish("a", "doc", tokens, computed=tokens - 1)
    written = run.keys("doc", tokens)[0][: (tokens - 1) // 16]
    run.store("a", written, written)
    assert run.settle()[-1].verdict == "cold"


@pytest.mark.parametrize(
    ("persistent", "fixed", "cause"),
    [(True, False, "hash_seed"), (True, True, None), (False, False, None)],
)
def test_a_persistent_tier_that_hashes_differently_each_time(persistent, fixed, cause):
    """F17."""
    run = Engine(engine(persistent_tier=persistent, hash_seed_fixed=fixed))
    run.serve_cold("a", "doc", 130)
    (record,) = run.settle()
    assert (record.verdict, record.cause) == ("cold", cause)


def test_a_requests_own_limit_on_loads_is_no_loss():
    run = Engine(engine(layout=attention_only()))
    run.serve_cold("a", "doc", 130)
    run.say(facts.ADDED, "b", run.now / 1e9, 130, None, False, None, 40)
    keys = run.keys("doc", 130)
    queries = [(keys[0][0], 2, 2, None)]
    pairs = [(names, len(names)) for names in keys]
    run.say(facts.LOOKUP, "b", run.now, 0, 130, 32, queries, pairs, False, None, 40)
    run.admit("b", 32)
    run.finish("b", "doc", 130)
    record = run.settle()[-1]
    assert (record.verdict, record.served_tokens, record.servable_tokens) == ("full", 32, 40)
    assert (record.lookups[0].cap, record.lookups[0].load_cap) == (40, 40)
    assert record.lookups[0].exit == "served"


def test_a_recorder_that_takes_all_gets_what_sampling_leaves_out():
    sampled, everything = Kept(), Kept(sampled=False)
    run = Engine()
    run.assembler = Assembler(run.info, run.numbers, [sampled, everything], 0.0, 0)
    run.serve_cold("a", "doc", 130)
    run.add("b", 130)
    run.look("b", "doc", 130, 128, [(0, 8, 8), (1, 2, 2)])
    run.admit("b", 128)
    run.finish("b", "doc", 130)
    run.settle()
    assert sampled.requests == []
    assert [record.request_id for record in everything.requests] == ["a", "b"]
    assert everything.requests[1].lookups[0].groups[0].resident == [(0, 7)]
    assert everything.requests[1].sampling_probability == 1.0
