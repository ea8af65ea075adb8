"""How each lookup ended, from the facts alone: exactly one exit each, on records and metrics."""

import pytest
from recording import Engine

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.semconv import Exit

ALL, NONE = [(0, 8, 8), (1, 2, 2)], [(0, 8, 0)]


def ask(run, result, found, local=0, in_transfer=False, tail=None, tokens=130):
    """One lookup of request ``b``; full attention in chunks of 16 beside states in 64."""
    keys = run.keys("doc", tokens)
    queries = [(keys[group][0], width, hits, None) for group, width, hits in found]
    pairs = [(names, len(names)) for names in keys]
    run.say(facts.LOOKUP, "b", run.now, local, tokens, result, queries, pairs, in_transfer, tail,
            None)  # fmt: skip


def admit(run, external=0, other=0):
    run.say(facts.ADMITTED, "b", external, 7 if external else None, set(), False, 0, other)


CASES = {
    Exit.SERVED: lambda run: (ask(run, 128, ALL), admit(run, 128)),
    Exit.PARTIAL_TAIL: lambda run: (ask(run, 112, ALL, tail=112), admit(run, 112)),
    Exit.COVERED: lambda run: (ask(run, 0, [], local=120), admit(run)),
    Exit.MISS: lambda run: (ask(run, 0, NONE), admit(run)),
    Exit.VETOED: lambda run: (ask(run, 0, [(0, 8, 8), (1, 2, 0)]), admit(run)),
    Exit.BELOW_CHUNK: lambda run: (ask(run, 0, [(0, 8, 3)]), admit(run)),
    Exit.DEFERRED_BACKEND: lambda run: ask(run, None, [(0, 8, None)]),
    Exit.DEFERRED_LOADING: lambda run: ask(run, None, ALL),
    Exit.DEFERRED_TRANSFER: lambda run: ask(run, None, [], in_transfer=True),
    Exit.NOT_ADMITTED: lambda run: (ask(run, 128, ALL), admit(run, 0)),
    Exit.OTHER_CONNECTOR: lambda run: (ask(run, 0, NONE), admit(run, 0, other=64)),
}


@pytest.mark.parametrize("expected", CASES)
def test_a_lookup_ends_in_one_way(expected):
    run = Engine()
    run.add("b", 130)
    CASES[expected](run)
    run.finish("b", "doc", 130)
    (record,) = run.settle()
    assert [lookup.exit for lookup in record.lookups] == [expected]
    counted = {
        labels[0]: value
        for (name, labels), value in run.numbers.counters.items()
        if name == semconv.LOOKUPS.name and value
    }
    assert counted == {expected: 1}
    veto = record.lookups[0].vetoing_group
    assert (veto is None) == (expected not in (Exit.VETOED, Exit.BELOW_CHUNK))


def test_a_request_that_does_not_read_is_skipped():
    run = Engine()
    run.add("b", 130, skip=True)
    ask(run, 0, [])
    admit(run)
    run.finish("b", "doc", 130)
    (record,) = run.settle()
    assert [lookup.exit for lookup in record.lookups] == [Exit.SKIPPED]
    assert (record.verdict, record.lost_tokens) == ("skipped", 0)


def test_a_popped_lookup_names_the_group():
    run = Engine()
    for group in run.info.layout.groups:
        group.drafter_used = True
    run.add("b", 130)
    ask(run, 0, [(0, 8, 1)])
    admit(run)
    run.finish("b", "doc", 130)
    (record,) = run.settle()
    assert [lookup.exit for lookup in record.lookups] == [Exit.POPPED_OUT]
    assert record.lookups[0].vetoing_group == 0


def test_every_exit_is_here():
    assert {*CASES, Exit.SKIPPED, Exit.POPPED_OUT} == set(Exit)
