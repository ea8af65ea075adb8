"""Ghosts and reuse distances, against straightforward simulations of the same."""

import random

import pytest

from kvlens.telemetry.semconv import CAPACITY_MULTIPLES
from kvlens.telemetry.state.reuse import FURTHEST, Ghosts, ReuseDistances


def key(number):
    return f"chunk-{number}".encode() + bytes(4)


def test_a_ghost_says_how_many_were_evicted_since():
    ghosts = Ghosts()
    ghosts.evicted([key(1), key(2), key(3)])
    assert ghosts.returned([key(1), key(9)]) == [(key(1), 2)]
    assert ghosts.returned([key(1)]) == []
    ghosts.evicted([key(2)])
    assert ghosts.returned([key(2), key(3)]) == [(key(2), 0), (key(3), 1)]


def test_ghosts_are_bounded_and_the_oldest_go_first():
    ghosts = Ghosts(limit=64)
    for number in range(1000):
        ghosts.evicted([key(number)])
        assert len(ghosts._when) <= 64
    assert ghosts.returned([key(0), key(999)]) == [(key(999), 0)]
    ghosts.evicted([key(1)])
    ghosts.clear()
    assert ghosts.returned([key(1)]) == []


def distances(trace):
    """By definition: distinct chunks between two uses."""
    last = {}
    for index, item in enumerate(trace):
        if item in last:
            yield len(set(trace[last[item] + 1 : index]))
        last[item] = index


def test_distances_are_exact_while_every_chunk_is_followed():
    rng = random.Random(5)
    trace = [rng.randrange(60) for _ in range(2000)]
    reuse = ReuseDistances(capacity=100)
    assert reuse.rate == 1
    found = [d for item in trace for d in reuse.used([key(item)])]
    assert found == list(distances(trace))


def lru_hit_ratio(trace, capacity):
    cache, hits = {}, 0
    for item in trace:
        if item in cache:
            hits += 1
            del cache[item]
        elif len(cache) == capacity:
            del cache[next(iter(cache))]
        cache[item] = True
    return hits / len(trace)


@pytest.mark.parametrize(("chunks", "tolerance"), [(400, 1e-9), (40_000, 0.03)])
def test_the_hit_ratio_is_that_of_a_cache_of_that_size(chunks, tolerance):
    rng = random.Random(7)
    # A few prompts are asked often, most hardly ever.
    trace = [int(chunks * rng.random() ** 3) for _ in range(20 * min(chunks, 4000))]
    capacity = chunks // 8
    reuse = ReuseDistances(capacity)
    assert (reuse.rate < 1) == (chunks > 1000)
    reuse.used(map(key, trace))
    ratios = reuse.hit_ratios()
    assert ratios == sorted(ratios)
    for multiple, ratio in zip(CAPACITY_MULTIPLES, ratios, strict=True):
        expected = lru_hit_ratio(trace, int(multiple * capacity))
        assert ratio == pytest.approx(expected, abs=tolerance), multiple


def test_what_is_followed_is_bounded_and_far_uses_are_first_uses():
    reuse = ReuseDistances(capacity=10_000, max_sampled=50)
    for start in range(0, 400_000, 1000):
        reuse.used(map(key, range(start, start + 1000)))
        assert len(reuse._last) == len(reuse._times) <= 50
    assert reuse.hit_ratios() == [0] * len(CAPACITY_MULTIPLES)
    assert reuse.rate == 50 / (FURTHEST * 10_000)


def test_the_past_fades():
    reuse = ReuseDistances(capacity=100)
    assert reuse.hit_ratios() is None
    for number in range(100_000):
        reuse.used([key(number)])
    for _ in range(300_000):
        reuse.used([key(1)])
    assert reuse.hit_ratios()[0] > 0.8
    with pytest.raises(ValueError, match="at least 1 chunk"):
        ReuseDistances(capacity=0)
