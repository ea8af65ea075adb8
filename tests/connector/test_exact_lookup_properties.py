"""``exact`` is the oracle's boundary, always; ``corrected`` is never above it nor unsafe."""

from random import Random

import pytest

pytest.importorskip("vllm")

from brute_force import overloads, problems, servable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lookup_cases import HIT, PENDING, RETRY, make_case

from kvlens.telemetry.verdict.oracle import servable_boundary

EXAMPLES = settings(
    max_examples=600,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_exact_is_the_oracle_and_corrected_is_safe(random: Random) -> None:
    case = make_case(random)
    assert problems(case) == []


@EXAMPLES
@given(st.randoms(use_true_random=False))
def test_the_oracle_is_the_definition_tried_on_every_boundary(random: Random) -> None:
    case = make_case(random)
    for results in (frozenset({HIT}), frozenset({HIT, PENDING, RETRY})):
        oracle = servable_boundary(
            case.layout,
            lambda group, chunk, hits=results: case.stored.get((group, chunk)) in hits,
            case.local,
            case.tokens,
            cap=case.cap,
            holds_boundary=lambda group, tokens, hits=results: case.tail(group, tokens) in hits,
        )
        if not overloads(case, oracle):
            assert oracle == servable(case, results)
