from __future__ import annotations

import random

import factory
import msgspec
from field import INFO, START, Night, load

from kvlens.dashboard.detect.slow_reload import SlowReload
from kvlens.telemetry.records import RequestRecord


def test_twice_as_slow_is_told_with_both_numbers() -> None:
    night = Night().see(load(n, 0.040 + n % 7 / 1000) for n in range(400))
    assert night.kinds == set()
    night.see(load(n, 0.100) for n in range(800, 830))
    incident = night.incidents["slow_reload"]
    assert (incident.severity, incident.state) == ("warning", "open")
    assert incident.evidence["p95_seconds"] == 0.1
    assert 0.044 <= incident.evidence["baseline_p95_seconds"] <= 0.05
    assert "times as long as before" in incident.summary
    night.see(load(n, 0.041) for n in range(1200, 1300))
    assert night.incidents["slow_reload"].close_reason == "recovered"


def test_less_than_thirty_loads_say_nothing() -> None:
    assert Night().see(load(n, 0.04) for n in range(29)).kinds == set()
    few = [*(load(n, 0.04) for n in range(25)), *(load(n, 1.0) for n in range(900, 929))]
    assert Night().see(few).kinds == set()


def test_longer_prompts_are_no_alarm() -> None:
    night = Night().see(load(n, 0.04, chunks=4) for n in range(400))
    assert night.see(load(n, 0.4, chunks=40) for n in range(800, 900)).kinds == set()


def test_a_bit_slower_is_no_alarm() -> None:
    night = Night().see(load(n, 0.04) for n in range(400))
    assert night.see(load(n, 0.07) for n in range(800, 900)).kinds == set()


def test_a_heavy_tail_is_no_alarm() -> None:
    """Exponential latencies, 20 runs of 1,500 loads: none is an accident's alarm."""
    alarms = 0
    for seed in range(20):
        draw = random.Random(seed)
        detector = SlowReload()
        for n in range(1_500):
            record = load(n, draw.expovariate(20))
            alarms += detector.observe(record, INFO) is not None
    assert alarms == 0


def test_what_is_normal_outlives_the_incarnation_but_not_the_version() -> None:
    night = Night().see(load(n, 0.04) for n in range(400))
    night.panel.end("inc-a1", START + 400)
    again = factory.engine(incarnation_id="inc-a2")
    detector = next(part for part in night.panel.parts() if part.kind == "slow_reload")
    assert isinstance(detector, SlowReload)
    found = [detector.observe(load(n, 0.1, info=again), again) for n in range(800, 830)]
    assert {i.incarnation_id for i in found if i is not None} == {"inc-a2"}
    newer = msgspec.structs.replace(again, vllm_version="0.33.0", incarnation_id="inc-a3")
    other = [detector.observe(load(n, 9.0, info=newer), newer) for n in range(2000, 2100)]
    assert other == [None] * 100


def test_synchronous_loads_are_not_comparable() -> None:
    def synchronous(index: int) -> RequestRecord:
        record = load(index, 5.0)
        return msgspec.structs.replace(
            record, loads=[msgspec.structs.replace(record.loads[0], synchronous=True)]
        )

    night = Night().see(load(n, 0.04) for n in range(400))
    assert night.see(map(synchronous, range(800, 900))).kinds == set()
