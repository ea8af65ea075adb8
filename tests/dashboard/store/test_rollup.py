from __future__ import annotations

import factory
import msgspec
import pytest

from kvlens.dashboard.model.totals import Totals, quantile
from kvlens.dashboard.store.codec import pack, unpack
from kvlens.dashboard.store.rollup import counters, fill, level_of, points
from kvlens.telemetry.records import encode
from kvlens.telemetry.semconv import TRANSFER_BUCKETS


def test_counters_of_one_request() -> None:
    totals = fill(Totals(), counters(factory.served_record(1)))
    assert totals.requests == {"full": 1}
    assert (totals.expected_tokens, totals.served_tokens, totals.lost_tokens) == (1024, 1024, 0)
    assert (totals.loads, totals.reload_seconds) == (1, 0.04)
    assert totals.reload_buckets[TRANSFER_BUCKETS.index(0.05)] == 1


def test_counters_of_groups_causes_and_costs() -> None:
    record = msgspec.structs.replace(
        factory.lost_record(1),
        evicted_tokens=64,
        lost_gpu_seconds=0.5,
        deferral_seconds=2.0,
        reuse_distance=5,
        vetoing_group=1,
        sampling_probability=0.5,
    )
    totals = fill(Totals(), counters(record))
    assert totals.lost_by_cause == {record.cause: record.lost_tokens * 2}
    assert (totals.evicted_tokens, totals.lost_gpu_seconds) == (128, 1.0)
    assert (totals.deferrals, totals.deferral_seconds) == (2, 4.0)
    assert totals.reuse_buckets == [0, 0, 0, 2]  # 5 is below 2 ** 3
    answered = {query.kv_group: query for query in record.lookups[-1].groups}
    for group, query in answered.items():
        sums = totals.groups[group]
        assert (sums.lookups, sums.width, sums.hits) == (2, 2 * query.width, 2 * query.raw_hits)
        assert sums.pops == 2 * query.popped
        assert sums.vetoes == (2 if group == 1 else 0)
    served = fill(Totals(), counters(factory.served_record(2)))
    loads = [chunks for load in factory.served_record(2).loads for chunks in load.groups]
    assert {g: sums.loaded for g, sums in served.groups.items() if sums.loaded} == {
        chunks.kv_group: chunks.loaded for chunks in loads
    }


def test_two_totals_do_not_share() -> None:
    first = fill(Totals(), [("requests.lost", 1)])
    assert fill(Totals(), []).requests == {}
    assert first.requests == {"lost": 1}


def test_a_key_of_a_newer_version_is_passed_over() -> None:
    unknown = ("widths.3", "group.x.width", "group.1.colour", "reload.99", "reuse.999", "reuse.x")
    assert fill(Totals(), [(key, 2) for key in unknown]) == fill(Totals(), [])


@pytest.mark.parametrize(("step", "level"), [(60, 60), (900, 60), (3600, 3600), (86_400, 3600)])
def test_coarse_steps_are_summed_from_hours(step: int, level: int) -> None:
    assert level_of(step) == level


def test_points_add_up_whatever_the_order() -> None:
    slots = [
        (120, {"lost_tokens": 1.0}),
        (0, {"lost_tokens": 2.0}),
        (60, {"lost_tokens": 4.0, "requests.lost": 1.0}),
    ]
    found = points(slots, 120)
    assert [(p.time, p.lost_tokens, p.requests) for p in found] == [
        (0, 6.0, {"lost": 1.0}),
        (120, 1.0, {}),
    ]


def test_quantile() -> None:
    buckets = [0.0] * (len(TRANSFER_BUCKETS) + 1)
    assert quantile(buckets, 0.5) is None
    buckets[TRANSFER_BUCKETS.index(0.05)] = 10
    assert quantile(buckets, 0.5) == pytest.approx(0.0375)
    assert quantile(buckets, 1.0) == 0.05
    buckets[-1] = 90
    assert quantile(buckets, 0.5) == TRANSFER_BUCKETS[-1]


@pytest.mark.parametrize(
    "text", ["{}", encode(factory.lost_record(1)), f' {{"a":"{"x" * 999}"}}\n']
)
def test_codec(text: str) -> None:
    assert unpack(pack(text)) == text.strip().encode()
    assert len(pack(text)) <= len(text)
