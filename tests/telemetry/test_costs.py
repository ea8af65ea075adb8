"""The engine's prefill rate and the price of what was lost."""

import pytest
from recording import SECOND, Engine, engine

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.costs import MIN_TOKENS, WINDOW, PrefillRate


def test_the_rate_is_the_median_so_that_a_slow_step_does_not_count():
    rate = PrefillRate()
    assert (rate.seconds_per_token, rate.tokens_per_second) == (None, None)
    assert rate.device_seconds(1000) == 0
    for seconds in (1.0, 1.0, 60.0):
        rate.step(seconds, 1000)
    assert rate.seconds_per_token == pytest.approx(0.001)
    assert rate.tokens_per_second == pytest.approx(1000)
    assert rate.device_seconds(500) == pytest.approx(0.5)


def test_steps_that_hardly_compute_tell_no_rate():
    rate = PrefillRate()
    rate.step(1.0, MIN_TOKENS - 1)
    rate.step(0.0, 1000)
    assert rate.seconds_per_token is None


def test_an_engine_that_becomes_faster_is_noticed():
    rate = PrefillRate()
    for seconds in [2.0] * WINDOW + [1.0] * WINDOW:
        rate.step(seconds, 1000)
    assert rate.tokens_per_second == pytest.approx(1000)


def test_every_device_counts():
    rate = PrefillRate(devices=8)
    rate.step(1.0, 1000)
    assert rate.device_seconds(1000) == pytest.approx(8)
    with pytest.raises(ValueError, match="at least 1"):
        PrefillRate(devices=0)


def lost_request(said: Engine) -> None:
    """Two chunks of the recurrent group are resident, and nothing is served."""
    keys = said.keys("p", 130)
    said.store("a", keys[0] + keys[1], keys[0] + keys[1])
    said.add("b", 130)
    said.look("b", "p", 130, 0, [(0, 8, 0)])
    said.admit("b", 0)
    said.say(facts.STARTED, [("b", 0)])
    said.finish("b", "p", 130)


def test_lost_tokens_have_a_price_in_record_and_metrics():
    said = Engine(engine(devices=2))
    said.say(facts.STEP, 0.5, 1000)
    lost_request(said)
    (record,) = said.settle()
    assert (record.lost_tokens, record.computed_tokens) == (128, 130)
    assert record.lost_gpu_seconds == pytest.approx(128 * 0.0005 * 2)
    seconds = said.numbers.counters[semconv.LOST_GPU_SECONDS.name, (record.cause,)]
    assert seconds == pytest.approx(record.lost_gpu_seconds)
    assert said.numbers.gauges[semconv.PREFILL_RATE.name, ()] == pytest.approx(2000)


def test_without_a_rate_nothing_is_charged():
    said = Engine()
    lost_request(said)
    (record,) = said.settle()
    assert record.lost_gpu_seconds == 0
    assert not [key for key in said.numbers.counters if key[0] == semconv.LOST_GPU_SECONDS.name]


def test_what_capacity_evicted_is_charged_to_capacity():
    said = Engine()
    said.say(facts.STEP, 1.0, 1000)
    keys = said.keys("p", 130)
    every = keys[0] + keys[1]
    said.store("a", every, every)
    other = said.keys("q", 130)
    said.store("c", other[0] + other[1], other[0] + other[1], evicted=every)
    said.add("b", 130)
    said.look("b", "p", 130, 0, [(0, 8, 0)])
    said.admit("b", 0)
    said.say(facts.STARTED, [("b", 0)])
    said.store("b", every, every)
    said.finish("b", "p", 130)
    (record,) = said.settle()
    assert (record.verdict, record.lost_tokens, record.evicted_tokens) == ("evicted", 0, 128)
    assert record.lost_gpu_seconds == pytest.approx(0.128)
    assert (record.ghost_chunks, record.ghost_distance) == (10, 9)
    counters = said.numbers.counters
    assert counters[semconv.LOST_GPU_SECONDS.name, ("capacity",)] == pytest.approx(0.128)
    assert counters[semconv.EVICTED_TOKENS.name, ()] == 128
    assert counters[semconv.GHOST_CHUNKS.name, ("0", "full_attention")] == 8
    distances = said.numbers.samples[semconv.GHOST_DISTANCE.name, ()]
    assert distances == [pytest.approx(0.09 - n / 100) for n in range(10)]


def test_prompt_tokens_and_tiers_by_where_they_came_from():
    said = Engine()
    keys = said.keys("p", 130)
    every = keys[0] + keys[1]
    said.store("a", every, every)
    said.add("b", 130)
    said.look("b", "p", 130, 128, [(0, 8, 8), (1, 2, 2)])
    said.admit("b", 128, set(every))
    said.say(facts.TIERS, "b", {"host": 100, "disk": 20, "tape": 8})
    said.say(facts.STARTED, [("b", 128)])
    said.finish("b", "p", 130)
    (record,) = said.settle()
    assert record.tier_tokens == {"host": 100, "disk": 20, "external_unspecified": 8}
    counters = said.numbers.counters
    assert counters[semconv.PROMPT_TOKENS.name, ("offload",)] == 128
    assert counters[semconv.PROMPT_TOKENS.name, ("computed",)] == 2
    assert counters[semconv.TIER_TOKENS.name, ("disk",)] == 20
    assert record.reuse_distance == 9
    assert said.now > SECOND


def test_what_another_connector_served_is_part_of_the_sum():
    said = Engine()
    said.add("b", 130)
    said.look("b", "p", 130, 0, [(0, 8, 0)])
    said.say(facts.ADMITTED, "b", 0, None, (), False, 16, 64)
    said.say(facts.STARTED, [("b", 80)])
    said.finish("b", "p", 130)
    (record,) = said.settle()
    assert (record.verdict, record.lost_tokens) == ("skipped", 0)
    parts = record.local_tokens, record.served_tokens, record.other_tokens, record.computed_tokens
    assert parts == (16, 0, 64, 50)
    counters = said.numbers.counters
    sources = {
        labels[0]: value
        for (name, labels), value in counters.items()
        if name == semconv.PROMPT_TOKENS.name
    }
    assert sources == {"local": 16, "offload": 0, "other_connector": 64, "computed": 50}
    assert (semconv.IDENTITY_VIOLATIONS.name, ("request_tokens",)) not in counters
