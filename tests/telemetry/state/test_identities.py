"""Numbers that have to add up: each identity holds on sound facts and is reported when broken."""

import random

import pytest
from recording import Engine, Numbers, layout

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.semconv import Identity
from kvlens.telemetry.state.identities import Identities


def violations(numbers):
    return {
        labels[0]: count
        for (name, labels), count in numbers.counters.items()
        if name == semconv.IDENTITY_VIOLATIONS.name
    }


def stored(said, prompt="p", tokens=130):
    keys = said.keys(prompt, tokens)
    every = keys[0] + keys[1]
    said.store("a", every, every)
    return every


def serve(said, request, hits=8, result=128, width=8, start=128, admitted=128):
    said.add(request, 130)
    said.look(request, "p", 130, result, [(0, width, hits), (1, 2, 2)])
    said.admit(request, admitted, {b"x\0\0\0\0"})
    said.say(facts.STARTED, [(request, start)])
    said.finish(request, "p", 130)
    return said.settle()[-1]


def test_sound_facts_violate_nothing():
    said = Engine()
    stored(said)
    record = serve(said, "b")
    assert (record.local_tokens, record.served_tokens, record.computed_tokens) == (0, 128, 2)
    assert violations(said.numbers) == {}


def test_after_a_full_hit_one_token_is_computed_again():
    numbers = Numbers()
    checks = Identities(layout(), numbers)
    checks.request(128, 64, 64, 1)
    assert violations(numbers) == {}
    checks.request(128, 64, 64, 0)
    checks.request(128, 64, 60, 1)
    assert violations(numbers) == {"request_tokens": 2}


def test_a_request_that_computes_less_than_it_should_is_reported_once_in_the_log(caplog):
    said = Engine()
    stored(said)
    for request in ("b", "c"):
        serve(said, request, start=64)
    assert violations(said.numbers) == {"request_tokens": 2}
    (line,) = [r.getMessage() for r in caplog.records]
    assert "0 local + 128 served + 66 computed of 130 prompt tokens" in line


def test_more_hits_than_questions():
    said = Engine()
    stored(said)
    serve(said, "b", hits=9)
    assert violations(said.numbers)[str(Identity.HITS_WITHIN_QUERIES)] == 1


def test_a_boundary_beyond_what_was_found():
    said = Engine()
    stored(said)
    serve(said, "b", hits=7)
    assert violations(said.numbers) == {"boundary_within_hits": 1}


@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda said, keys: said.say(facts.OFFERED, "x", [], [], [b"never\0\0\0\0"]), 1),
        (lambda said, keys: said.say(facts.STORED, {b"never\0\0\0\0"}, True), 1),
        (lambda said, keys: said.say(facts.OFFERED, "x", [], [], keys[:2]), 0),
        (lambda said, keys: said.say(facts.STORED, {b"never\0\0\0\0"}, False), 0),
        (lambda said, keys: said.say(facts.RESET), 0),
        (lambda said, keys: said.say(facts.LOST, 5, True), 0),
    ],
    ids=["evicted unseen", "stored unseen", "evicted", "failed", "reset", "facts lost"],
)
def test_stored_is_resident_evicted_and_reset(spoil, seen):
    said = Engine()
    keys = stored(said)
    spoil(said, keys)
    for _ in range(3):
        said.settle()
    assert violations(said.numbers) == ({"stored_chunks": 1} if seen else {})


def test_a_chunk_that_was_found_and_never_stored():
    said = Engine()
    keys = stored(said)
    said.say(facts.RESET)
    said.add("b", 130)
    said.look("b", "p", 130, 128, [(0, 8, 8), (1, 2, 2)])
    said.settle()
    assert len(keys) == 10
    assert violations(said.numbers) == {"stored_chunks": 2}  # of either group


def test_once_all_is_known_again_counting_goes_on():
    said = Engine()
    stored(said)
    said.say(facts.LOST, 5, True)
    said.settle()
    said.say(facts.RESET)
    stored(said, "q")
    said.settle()
    assert violations(said.numbers) == {}
    said.say(facts.OFFERED, "x", [], [], [b"never\0\0\0\0"])
    said.settle()
    assert violations(said.numbers) == {"stored_chunks": 1}


def test_the_identities_hold_over_a_long_random_run():
    rng, said = random.Random(11), Engine()
    resident, counts = [], {"stored": 0, "evicted": 0, "reset": 0}
    for number in range(3000):
        prompt = f"p{rng.randrange(40)}"
        keys = [key for group in said.keys(prompt, 64 * rng.randrange(1, 5)) for key in group]
        fresh = [key for key in keys if key not in resident]
        room = said.info.capacity_chunks - len(resident)
        evicted = [key for key in resident if key not in keys][: max(0, len(fresh) - room)]
        said.add(f"r{number}", 300)
        if said.store(f"r{number}", keys, fresh, evicted) or evicted:
            resident = [key for key in resident if key not in evicted] + fresh
            counts["stored"] += len(fresh)
            counts["evicted"] += len(evicted)
        said.finish(f"r{number}", prompt, 300)
        if rng.random() < 0.01:
            said.say(facts.RESET)
            counts["reset"] += len(resident)
            resident = []
        said.assembler.tick(said.now)
    assert violations(said.numbers) == {}
    totals = {
        name: sum(
            value for (metric, _), value in said.numbers.counters.items() if metric == declared.name
        )
        for name, declared in (
            ("stored", semconv.STORED_CHUNKS),
            ("evicted", semconv.EVICTED_CHUNKS),
            ("reset", semconv.RESET_CHUNKS),
        )
    }
    assert totals == counts
    assert min(counts.values()) > 0
    assert counts["stored"] == len(resident) + counts["evicted"] + counts["reset"]
