from __future__ import annotations

from collections.abc import Iterable

import factory
import msgspec
import pytest

from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.telemetry.records import RequestRecord

INFO = factory.engine()
START = factory.START


def lost(index: int, **fields: object) -> RequestRecord:
    return msgspec.structs.replace(factory.lost_record(index, INFO), **fields)


def served(index: int, **fields: object) -> RequestRecord:
    record = factory.served_record(index, INFO)
    return msgspec.structs.replace(record, **fields)


def feed(detector: ZeroHit, records: Iterable[RequestRecord]) -> list[Incident]:
    found = (detector.observe(record, INFO) for record in records)
    return [incident for incident in found if incident is not None]


def test_the_third_lost_request_opens_it() -> None:
    incidents = feed(ZeroHit(), [lost(0), lost(1), lost(2)])
    assert len(incidents) == 1
    incident = incidents[0]
    assert (incident.kind, incident.severity, incident.state) == ("zero_hit", "critical", "open")
    assert (incident.engine_id, incident.incarnation_id) == (INFO.engine_id, "inc-a1")
    assert (incident.verdict, incident.cause, incident.confidence) == (
        "lost",
        "drafter_fallback",
        "certain",
    )
    assert incident.opened_at == incident.updated_at == START + 12
    assert incident.evidence == {
        "run_length": 3,
        "expected_tokens": 3 * 1024,
        "servable_tokens": 3 * 1024,
        "served_tokens": 0,
        "causes": {"drafter_fallback": 3},
        "drafter_groups": [0, 1, 2],
        "annotated_drafter_groups": [],
        "eligible_before": 0.0,
        "served_nothing_before": 0.0,
    }
    assert incident.summary == (
        "3 requests were served 0 of 3,072 tokens that offloading should have served; "
        "cause: drafter fallback"
    )
    assert incident.next_step.startswith("Use vLLM 0.30.0")
    assert incident.groups == [1]
    assert incident.example_requests == [lost(n).internal_request_id for n in range(3)]
    assert (incident.lost_tokens, incident.requests) == (3 * 1024, 3)
    assert (incident.scope.since, incident.scope.until) == (START + 10, START + 12)
    assert (incident.scope.min_expected_tokens, incident.scope.max_served_tokens) == (512, 0)


def test_it_grows_and_stays_one() -> None:
    incidents = feed(ZeroHit(), map(lost, range(20)))
    assert len({incident.id for incident in incidents}) == 1
    assert (incidents[-1].requests, len(incidents[-1].example_requests)) == (20, 5)
    assert incidents[-1].opened_at == START + 12
    assert incidents[-1].updated_at == START + 29


def test_ten_served_in_a_row_close_it() -> None:
    detector = ZeroHit()
    feed(detector, map(lost, range(3)))
    broken = [*map(served, range(3, 12)), lost(12), *map(served, range(13, 22))]
    assert [incident.state for incident in feed(detector, broken)] == ["open"]
    closed = feed(detector, [served(22)])
    assert [(i.state, i.close_reason, i.closed_at) for i in closed] == [
        ("closed", "recovered", START + 32)
    ]
    assert closed[0].requests == 4
    # A new run is a new incident.
    again = feed(detector, map(lost, range(30, 33)))
    assert [incident.state for incident in again] == ["open"]
    assert again[0].id != closed[0].id


def test_the_end_of_the_engine_closes_it() -> None:
    detector = ZeroHit()
    feed(detector, map(lost, range(3)))
    closed = detector.end("inc-a1", START + 99)
    assert closed is not None
    assert (closed.state, closed.close_reason, closed.closed_at) == (
        "closed",
        "engine_gone",
        START + 99,
    )
    assert detector.end("inc-a1", START + 99) is None
    assert detector.dump("inc-a1") is None


def test_an_engine_that_ends_without_incident_says_nothing() -> None:
    detector = ZeroHit()
    feed(detector, map(lost, range(2)))
    assert detector.end("inc-a1", START) is None
    assert detector.end("stranger", START) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"expected_tokens": 511},  # less than the largest chunk: a remainder, N9
        {"verdict": "skipped"},  # N6
        {"verdict": "cold", "expected_tokens": 0},  # N4, N5
        {"verdict": "evicted"},  # F8 is capacity, not this
        {"verdict": "local"},
    ],
)
def test_requests_that_were_owed_nothing_do_not_count(fields: dict[str, object]) -> None:
    assert feed(ZeroHit(), (lost(n, **fields) for n in range(50))) == []


@pytest.mark.parametrize("exit_", ["other_connector", "not_admitted", "skipped"])
def test_lookups_that_ended_elsewhere_do_not_count(exit_: str) -> None:
    """N10, and clients that gave up while they waited."""

    def record(index: int) -> RequestRecord:
        lookup = msgspec.structs.replace(lost(index).lookups[-1], exit=exit_)
        return lost(index, lookups=[lookup])

    assert feed(ZeroHit(), map(record, range(50))) == []


def test_ineligible_requests_do_not_interrupt_a_run() -> None:
    cold = factory.cold_record(1, INFO)
    assert len(feed(ZeroHit(), [lost(0), cold, lost(2), cold, lost(3)])) == 1


def test_small_chunks_need_256_tokens() -> None:
    group = msgspec.structs.replace(INFO.layout.groups[0], tokens_per_chunk=16)
    info = msgspec.structs.replace(
        INFO, layout=msgspec.structs.replace(INFO.layout, groups=[group])
    )

    def opens(tokens: int) -> bool:
        detector = ZeroHit()
        records = [lost(n, expected_tokens=tokens) for n in range(3)]
        return any(detector.observe(record, info) is not None for record in records)

    assert (opens(255), opens(256)) == (False, True)


def test_an_always_serving_engine_needs_three() -> None:
    detector = ZeroHit()
    assert feed(detector, map(served, range(100))) == []
    assert len(feed(detector, map(lost, range(100, 103)))) == 1


def test_a_partly_failing_engine_needs_more() -> None:
    """Every second request served: 0.5 ** 20 is the first below one in a million."""
    detector = ZeroHit()
    history = [served(n) if n % 2 else lost(n) for n in range(100)]
    assert feed(detector, history) == []
    assert feed(detector, map(lost, range(100, 119))) == []
    assert len(feed(detector, [lost(119)])) == 1


def test_history_counts_what_sampling_left_out() -> None:
    """Sampled at 1 %, ten records stand for a thousand served requests."""
    detector = ZeroHit()
    history = [served(n, sampling_probability=0.01) for n in range(10)]
    feed(detector, [lost(99, finish_time=START), *history])
    opened = feed(detector, map(lost, range(10, 13)))
    assert [incident.evidence["eligible_before"] for incident in opened] == [pytest.approx(1001)]


def test_an_incident_is_not_the_engines_normal_rate() -> None:
    detector = ZeroHit()
    feed(detector, [served(0), *map(lost, range(1, 200)), *map(served, range(200, 210))])
    assert len(feed(detector, map(lost, range(210, 213)))) == 1


def test_requests_older_than_the_window_do_not_count() -> None:
    detector = ZeroHit()
    slow = [lost(n, finish_time=START + 901 * n) for n in range(8)]
    assert feed(detector, slow) == []
    in_time = [lost(n + 8, finish_time=slow[-1].finish_time + n) for n in range(2)]
    # With the last two slow ones, 901 s apart: opened by the first, grown by the second.
    assert [incident.requests for incident in feed(detector, in_time)] == [3, 4]


def test_a_window_just_wide_enough() -> None:
    assert len(feed(ZeroHit(), [lost(n, finish_time=START + 900 * n) for n in range(3)])) == 1


def test_late_arrivals_take_their_place() -> None:
    detector = ZeroHit()
    assert feed(detector, [lost(2), lost(3), served(1)]) == []  # before the run: history
    assert len(feed(detector, [lost(4)])) == 1
    split = ZeroHit()
    assert feed(split, [lost(1), lost(3), served(2)]) == []  # splits the run
    assert feed(split, [lost(0), lost(4)]) == []  # 3, 4
    # Two of three failed before: 2/3 ** 35 is the first below one in a million.
    assert feed(split, map(lost, range(5, 37))) == []
    assert len(feed(split, [lost(37)])) == 1


def test_engines_do_not_mix() -> None:
    detector = ZeroHit()
    other = factory.engine("node-b:0", "inc-b1")
    for n in range(2):
        assert detector.observe(factory.lost_record(n, other), other) is None
    assert feed(detector, map(lost, range(2))) == []


def test_the_most_common_cause_and_the_least_certainty() -> None:
    odd = lost(
        1, cause="window_veto", confidence="likely", vetoing_group=2, next_step="something else"
    )
    incident = feed(ZeroHit(), [lost(0), odd, lost(2)])[-1]
    assert (incident.cause, incident.confidence, incident.groups) == (
        "drafter_fallback",
        "likely",
        [1, 2],
    )
    assert incident.evidence["causes"] == {"drafter_fallback": 2, "window_veto": 1}
    assert incident.next_step.startswith("Use vLLM")


def test_without_a_cause() -> None:
    incident = feed(ZeroHit(), [lost(n, cause=None, next_step="") for n in range(3)])[-1]
    assert incident.cause is None
    assert incident.summary.endswith("should have served")
    assert incident.evidence["causes"] == {"none": 3}


def test_every_restart_point_gives_the_same() -> None:
    records = [
        *map(served, range(5)),
        *map(lost, range(5, 12)),
        *map(served, range(12, 23)),
        *map(lost, range(23, 30)),
    ]
    whole = feed(ZeroHit(), records)
    assert [incident.state for incident in whole].count("closed") == 1
    for cut in range(1, len(records)):
        before = ZeroHit()
        first = feed(before, records[:cut])
        state = before.dump("inc-a1")
        assert state is not None
        after = ZeroHit()
        after.load("inc-a1", state)
        assert first + feed(after, records[cut:]) == whole


def test_the_longest_run_that_any_history_needs() -> None:
    """An engine that served 1 of 10,000 before: state is bounded, and it still opens."""
    detector = ZeroHit()
    detector.load("inc-a1", _rare(detector, failed=9_999, eligible=10_000))
    run = [lost(n, finish_time=START + 20 + n / 1000) for n in range(4_096)]
    assert len(feed(detector, run)) == 1


def _rare(detector: ZeroHit, failed: float, eligible: float) -> bytes:
    feed(detector, [served(0)])
    state = detector.dump("inc-a1")
    assert state is not None
    fields = msgspec.msgpack.decode(state)
    return msgspec.msgpack.encode({**fields, "failed": failed, "eligible": eligible})


def test_thresholds() -> None:
    detector = ZeroHit(
        lambda _: Thresholds(eligible_min_tokens=2048, zero_hit_requests=2, zero_hit_recovery=1)
    )
    assert feed(detector, map(lost, range(9))) == []
    big = [factory.lost_record(n, INFO, chunks=4) for n in range(2)]
    assert len(feed(detector, big)) == 1
    closed = feed(detector, [factory.served_record(3, INFO, chunks=4)])
    assert [incident.state for incident in closed] == ["closed"]
