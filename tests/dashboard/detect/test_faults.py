"""Stalls, refused stores, unsafe boundaries, lost telemetry: F10 to F14, F19, F20."""

from __future__ import annotations

from typing import Any

from field import START, Night, lost, partial, refusing, served, waiting

from kvlens.dashboard.detect.panel import Observed
from kvlens.telemetry.records import GroupChunks, Load, RequestRecord, Store


def test_f10_a_stall_is_seen_within_fifteen_seconds() -> None:
    """Reports come after 1 s, then every 5 s."""
    night = Night()
    for seconds in (1, 6):
        night.see([waiting(0, seconds, START + seconds)], waiting=True)
    assert night.kinds == set()
    night.see([waiting(0, 11, START + 11)], waiting=True)
    incident = night.incidents["deferral_stall"]
    assert incident.opened_at - START <= 15
    assert (incident.severity, incident.verdict, incident.cause) == (
        "warning",
        "stalled",
        "pending_store",
    )
    assert incident.summary == (
        "1 request waited for an answer of the tier, up to 11 s; cause: pending store"
    )


def test_f10_the_client_gives_up_after_300_s() -> None:
    reports = [waiting(0, 1 + 5 * n, START + 1 + 5 * n) for n in range(60)]
    night = Night().see(reports, waiting=True)
    night.see([waiting(0, 300, START + 300, finish_reason="abort")])
    incident = night.incidents["deferral_stall"]
    assert (incident.state, incident.requests) == ("open", 1)
    assert incident.evidence["longest_seconds"] == 300
    assert incident.evidence["deferred_lookups"] == 1_200_000
    assert incident.example_requests == [reports[0].internal_request_id]


def test_f11_a_retry_that_never_ends_is_told_once_it_finished() -> None:
    stalled = waiting(0, 240, START + 240, cause="retry_stall", causes=["retry_stall"])
    assert Night().see([stalled]).incidents["deferral_stall"].cause == "retry_stall"


def test_a_stall_shows_in_the_lookups_too() -> None:
    bare = waiting(0, 30, START + 30, deferral_seconds=0.0)
    (lookup,) = bare.lookups
    assert Night().see([bare]).kinds == set()  # it does not say how long
    lookup.last_time = START + 30
    incident = Night().see([bare]).incidents["deferral_stall"]
    assert incident.evidence["longest_seconds"] == 30


def test_several_stalled_requests_are_critical() -> None:
    night = Night().see([waiting(n, 12, START + 12 + n) for n in range(3)], waiting=True)
    assert night.incidents["deferral_stall"].severity == "critical"
    assert night.incidents["deferral_stall"].requests == 3


def test_a_stall_closes_after_five_quiet_minutes() -> None:
    night = Night().see([waiting(0, 12, START + 12)], waiting=True)
    night.see(served(n, finish_time=START + 20 + n) for n in range(100))
    assert night.incidents["deferral_stall"].state == "open"
    night.see([served(0, finish_time=START + 330)])
    assert night.incidents["deferral_stall"].close_reason == "recovered"


def test_short_waits_are_no_stall() -> None:
    assert Night().see(served(n, deferral_seconds=9.0) for n in range(99)).kinds == set()


def test_f12_f13_f20_one_unsafe_boundary_is_enough() -> None:
    unsafe = served(
        0,
        verdict="unsafe",
        cause="misaligned_state",
        causes=["misaligned_state"],
        evidence={"boundary": 176, "state_tokens": 192, "kv_group": 1},
    )
    night = Night().see([unsafe])
    assert night.kinds == {"unsafe_boundary"}
    incident = night.incidents["unsafe_boundary"]
    assert incident.severity == "critical"
    assert (incident.evidence["boundary"], incident.evidence["state_tokens"]) == (176, 192)
    night.see(served(n, finish_time=START + 9_000 + n) for n in range(99))
    assert incident.state == "open"  # until the engine ends: its caches may hold more of it
    night.panel.end("inc-a1", START + 10_000)
    assert night.incidents["unsafe_boundary"].close_reason == "engine_gone"


def test_f14_a_block_with_an_unwritten_slot() -> None:
    record = served(0, verdict="unsafe", cause="unwritten_slot", causes=["unwritten_slot"])
    incident = Night().see([record]).incidents["unsafe_boundary"]
    assert incident.summary.startswith("1 request stored a block whose last slot")


def test_f19_refused_stores_while_loads_go_on() -> None:
    night = Night().see(refusing(n, 1, stores=2) for n in range(20))
    assert night.kinds == {"store_failures"}
    incident = night.incidents["store_failures"]
    assert incident.severity == "warning"
    assert "refused 20 of 40 stores (80 chunks), while 20 loads went on" in incident.summary


def test_refused_stores_that_cost_everything_are_critical() -> None:
    refused = {
        "served_tokens": 0,
        "verdict": "lost",
        "lost_tokens": 1024,
        "loads": [],
        "cause": "allocation_failure",
        "causes": ["allocation_failure"],
    }
    night = Night().see(refusing(n, 2, stores=2, **refused) for n in range(6))
    assert night.incidents["store_failures"].severity == "critical"
    assert night.kinds == {"store_failures", "zero_hit"}


def failing(n: int, **change: Any) -> RequestRecord:
    """A request whose load failed."""
    lost = {"served_tokens": 0, "failed_tokens": 1024, "lost_tokens": 1024, "verdict": "lost",
            "cause": "transfer_failed", "causes": ["transfer_failed"]}  # fmt: skip
    load = Load(job_id=n, time=START + n, completed_at=START + n + 0.1, failed=True)
    return served(n, loads=[load], **lost, **change)


def test_f26_loads_that_fail_are_told_once_it_repeats() -> None:
    assert Night().see([served(0), failing(1)]).kinds == set()
    night = Night().see([served(0), failing(1), served(2), failing(3)])
    assert night.kinds == {"load_failures"}
    incident = night.incidents["load_failures"]
    assert incident.severity == "warning"
    assert incident.summary.startswith("2 of 4 loads failed: 2,048 tokens were found")
    assert "kv_load_failure_policy" in incident.next_step


def test_loads_that_all_fail_are_critical() -> None:
    night = Night().see(failing(n) for n in range(4))
    assert night.incidents["load_failures"].severity == "critical"
    assert night.kinds == {"load_failures", "zero_hit"}


def test_stores_that_fail_count_as_those_that_are_refused() -> None:
    store = Store(time=START, job_id=1, failed=True, groups=[GroupChunks(kv_group=0, stored=4)])
    night = Night().see(served(n, stores=[store]) for n in range(12))
    assert night.kinds == {"store_failures"}
    summary = night.incidents["store_failures"].summary
    assert "refused 0 of 12 stores (0 chunks), 12 more failed, while 12 loads" in summary


def test_a_few_refusals_are_normal() -> None:
    assert Night().see(refusing(n, 1, stores=1) for n in range(9)).kinds == set()
    rare = [refusing(n, 1 if n % 20 == 0 else 0, stores=10) for n in range(200)]
    assert Night().see(rare).kinds == set()


def test_dropped_facts_are_told_and_forgotten_in_time() -> None:
    night = Night().see([served(0), served(1, dropped=0), served(2, dropped=7)])
    assert night.kinds == {"telemetry_lost"}
    assert "dropped 7 facts or spans" in night.incidents["telemetry_lost"].summary
    night.see([served(3, dropped=7), served(4, dropped=9)])
    assert night.incidents["telemetry_lost"].evidence["dropped"] == 9
    night.see([served(5, dropped=9, finish_time=START + 700)])
    assert night.incidents["telemetry_lost"].state == "closed"


def test_every_kind_closes_with_its_engine() -> None:
    night = Night().see(
        [
            *(partial(n) for n in range(5)),
            *(refusing(n, 1) for n in range(5, 20)),
            served(20, dropped=1),
            waiting(21, 20, START + 40),
        ]
    )
    assert len(night.kinds) == 4
    night.panel.end("inc-a1", START + 99)
    assert {i.close_reason for i in night.incidents.values()} == {"engine_gone"}
    night.panel.changed.clear()
    night.panel.end("inc-a1", START + 99)
    assert night.kinds == set()


def test_what_waits_and_what_finished_is_taken_in_order_of_time() -> None:
    """However exports are grouped, a replay comes to the same."""
    records = [Observed(lost(n)) for n in range(6)]
    reports = [Observed(waiting(50 + n, 12, START + 11.5 + n), waiting=True) for n in range(3)]
    together, apart = Night(), Night()
    known = {together.info.incarnation_id: together.info}
    together.panel.observe([*records, *reports], known.get)
    for one in sorted([*records, *reports], key=lambda item: item.order):
        apart.panel.observe([one], known.get)
    assert together.incidents == apart.incidents
