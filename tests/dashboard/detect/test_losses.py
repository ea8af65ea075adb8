"""``lost_hits``, ``store_gaps`` and ``capacity_thrash``: F1, F2, F8, F9, F15 and their kinds."""

from __future__ import annotations

import factory
import msgspec
import pytest
from field import INFO, START, Night, evicted, gap, lost, partial, served, thresholds


def test_f1_the_first_is_lost_the_others_in_part() -> None:
    traffic = [partial(n, 512) for n in range(4)]
    night = Night().see(traffic)
    assert night.kinds == {"lost_hits"}
    incident = night.incidents["lost_hits"]
    assert (incident.severity, incident.cause, incident.groups) == (
        "warning",
        "drafter_fallback",
        [1],
    )
    assert incident.summary == (
        "4 of 4 requests lost 2,048 of 4,096 tokens (50%) that offloading should have served; "
        "cause: drafter fallback"
    )
    assert incident.evidence["served_tokens"] == incident.lost_tokens == 2048
    assert incident.next_step == "do this"


def test_traffic_that_loses_everything_is_one_incident() -> None:
    assert Night().see(map(lost, range(30))).kinds == {"zero_hit"}


def test_losses_after_good_service_are_one_incident_too() -> None:
    night = Night().see([*map(served, range(40)), *map(lost, range(40, 60))])
    assert night.kinds == {"zero_hit"}
    night.see(map(served, range(60, 75)))
    assert night.kinds == {"zero_hit"}
    assert night.incidents["zero_hit"].state == "closed"


def test_every_third_request_lost_is_a_share() -> None:
    night = Night().see(lost(n) if n % 3 == 0 else served(n) for n in range(30))
    assert night.kinds == {"lost_hits"}
    assert night.incidents["lost_hits"].verdict == "lost"


def test_a_tenth_is_not_too_much() -> None:
    one_in_ten = [lost(n) if n % 10 == 9 else served(n) for n in range(100)]
    assert Night().see(one_in_ten).kinds == set()


def test_it_closes_when_the_share_has_halved_and_can_open_again() -> None:
    night = Night().see(partial(n) for n in range(5))
    night.see(served(n) for n in range(5, 100))
    assert night.incidents["lost_hits"].close_reason == "recovered"
    first = night.incidents["lost_hits"].id
    night.panel.changed.clear()
    night.see(partial(n) for n in range(600, 605))
    assert night.incidents["lost_hits"].state == "open"
    assert night.incidents["lost_hits"].id != first


def test_old_losses_leave_the_window() -> None:
    slow = [partial(n, finish_time=START + n * 200.0) for n in range(9)]
    assert Night().see(slow).kinds == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "full", "lost_tokens": 512},  # N9: a remainder
        {"verdict": "full", "lost_tokens": 0},
        {"verdict": "skipped"},  # N6
    ],
)
def test_remainders_and_requests_that_did_not_read_are_no_loss(fields: dict[str, object]) -> None:
    assert Night().see(partial(n, **fields) for n in range(50)).kinds == set()


def test_f2_one_request_with_three_gaps_is_proof() -> None:
    night = Night().see([gap(0)])
    assert night.kinds == {"store_gaps"}
    incident = night.incidents["store_gaps"]
    assert (incident.severity, incident.verdict, incident.cause) == (
        "warning",
        "partial",
        "store_gap",
    )
    assert incident.evidence["first_gap_chunk"] == 31
    assert incident.evidence["gap_distance"] == 32
    assert "the first at chunk 31, every 32 chunks" in incident.summary
    assert incident.scope.cause == "store_gap"


def test_a_single_gap_may_be_an_accident_three_requests_are_not() -> None:
    one = {"gaps": 1, "first_gap_chunk": 4, "gap_chunks": [4], "kv_group": 0}
    night = Night(thresholds=thresholds(lost_hits_share=0.9))
    night.see(gap(n, evidence=one) for n in range(2))
    assert night.kinds == set()
    assert night.see([gap(2, evidence=one)]).kinds == {"store_gaps"}


def test_gaps_close_after_half_an_hour_without() -> None:
    night = Night().see([gap(0)])
    night.see([served(1, finish_time=START + 600)])
    assert night.incidents["store_gaps"].state == "open"
    night.see([served(2, finish_time=START + 2000)])
    assert night.incidents["store_gaps"].state == "closed"


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"gaps": "many", "gap_chunks": "31", "kv_group": None},
        {"gaps": True},
        {"gaps": 2**70, "gap_chunks": [2**70, {}, 3], "first_gap_chunk": -(2**70)},
    ],
)
def test_evidence_from_outside_may_have_any_shape(evidence: dict[str, object]) -> None:
    night = Night(thresholds=thresholds(lost_hits_share=0.9))
    night.see(gap(n, evidence=evidence) for n in range(3))
    assert night.kinds == {"store_gaps"}
    for part in night.panel.parts():
        assert all(part.dump(key) is not None for key in part.dirty)


def test_f8_a_prompt_that_takes_a_third_of_the_tier() -> None:
    """A, B, C, then A again: one request is enough, since no traffic fits such a tier."""
    night = Night().see([*map(factory.cold_record, range(3)), evicted(3, 21_760, slots=90)])
    assert night.kinds == {"capacity_thrash"}
    incident = night.incidents["capacity_thrash"]
    assert (incident.severity, incident.verdict, incident.cause) == (
        "warning",
        "evicted",
        "capacity",
    )
    assert incident.evidence["slots_needed"] == 90
    assert incident.evidence["capacity_chunks"] == 293
    assert "one prompt takes 90 of 293 slots" in incident.summary


def test_f9_a_prompt_larger_than_the_tier() -> None:
    info = msgspec.structs.replace(INFO, capacity_chunks=43)
    record = lost(
        0,
        info,
        cause="capacity",
        causes=["capacity"],
        confidence="certain",
        evidence={"slots_needed": 75, "capacity_chunks": 43},
    )
    night = Night(info).see([record])
    assert night.kinds == {"capacity_thrash"}
    assert night.incidents["capacity_thrash"].evidence["slots_needed"] == 75


def test_three_evictions_that_are_most_of_the_reuse() -> None:
    assert Night().see(map(evicted, range(2))).kinds == set()
    assert Night().see(map(evicted, range(3))).kinds == {"capacity_thrash"}


def test_evictions_of_which_no_number_is_told() -> None:
    silent = [evicted(n, evidence={}, prompt_tokens=1_100) for n in range(3)]
    night = Night().see(silent)
    assert night.kinds == {"capacity_thrash"}
    assert night.incidents["capacity_thrash"].evidence["evicted_tokens"] == 3_300


def test_a_cache_that_misses_at_times_is_a_cache() -> None:
    traffic = [evicted(n) if n % 4 == 0 else served(n) for n in range(100)]
    assert Night().see(traffic).kinds == set()


def test_the_records_own_account_of_evicted_tokens() -> None:
    """A partly served request tells how much more was evicted."""
    traffic = [served(n, evicted_tokens=4096) for n in range(3)]
    night = Night().see(traffic)
    assert night.kinds == {"capacity_thrash"}
    assert "12,288 of 15,360 reused tokens (80%)" in night.incidents["capacity_thrash"].summary


def test_f15_a_tail_never_stored_is_lost_by_share_only() -> None:
    tail = {"verdict": "unstored", "cause": "tail_held_back", "causes": ["tail_held_back"]}
    night = Night().see(partial(n, **tail) for n in range(5))
    assert night.kinds == {"lost_hits"}
    assert night.incidents["lost_hits"].verdict == "unstored"
