"""What every store does, SQLite and ClickHouse alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from typing import get_args

import factory
import msgspec
import pytest
from factory import batch

from kvlens.dashboard.model.batch import Batch, RecordRow
from kvlens.dashboard.model.query import RequestQuery, Sort
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.semconv import ENGINE_STARTED, ENGINE_STOPPED

A = factory.engine()
B = factory.engine("node-b:0", "inc-b1", affected=False, model="other")
AT = (1.0).hex()


def ids(store: Store, **query: object) -> list[str]:
    return [record.request_id for record in store.requests(RequestQuery(**query)).records]  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was(store: Store) -> None:
    record = factory.lost_record(1, A)
    appended = store.append([batch(A, [record])])
    assert [stored for _, stored in appended.records] == [record]
    assert store.request("cmpl-0001") == record
    assert store.request(record.internal_request_id) == record
    assert store.request("cmpl-0002") is None


def test_the_same_batch_twice_is_stored_once(store: Store) -> None:
    records = [factory.lost_record(index, A) for index in range(3)]
    store.append([batch(A, records)])
    again = store.append([batch(A, records), batch(A, [factory.lost_record(3, A)] * 2)])
    assert (len(again.records), again.duplicates) == (1, 4)
    assert store.engines()[0].totals.requests == {"lost": 4}


def test_two_engines_may_use_the_same_request_id(store: Store) -> None:
    first, second = factory.lost_record(1, A, finish=factory.START), factory.served_record(1, B)
    second = msgspec.structs.replace(second, internal_request_id=first.internal_request_id)
    store.append([batch(A, [first]), batch(B, [second])])
    assert len(ids(store)) == 2
    assert store.request(first.internal_request_id) == second


def test_filters(store: Store) -> None:
    store.append(
        [
            batch(A, [factory.lost_record(1, A), factory.cold_record(2, A)]),
            batch(B, [factory.served_record(3, B), factory.lost_record(4, B, chunks=4)]),
        ]
    )
    at = factory.START + 10.0
    assert ids(store) == ["cmpl-0004", "cmpl-0003", "cmpl-0002", "cmpl-0001"]
    assert ids(store, since=at + 2, until=at + 3) == ["cmpl-0003", "cmpl-0002"]
    assert ids(store, engine="inc-a1") == ["cmpl-0002", "cmpl-0001"]
    assert ids(store, engine="node-b:0") == ["cmpl-0004", "cmpl-0003"]
    assert ids(store, engine="nobody") == []
    assert ids(store, model="other", verdicts=("full",)) == ["cmpl-0003"]
    assert ids(store, model="other", engine="inc-a1") == []
    assert ids(store, verdicts=("full", "cold")) == ["cmpl-0003", "cmpl-0002"]
    assert ids(store, verdicts=("lost",)) == ["cmpl-0004", "cmpl-0001"]
    assert ids(store, verdicts=("lost", "partial")) == ["cmpl-0004", "cmpl-0001"]
    assert ids(store, cause="drafter_fallback") == ["cmpl-0004", "cmpl-0001"]
    assert ids(store, cause="drafter_fallback", verdicts=("lost",), engine="inc-a1") == [
        "cmpl-0001"
    ]
    assert ids(store, cause="store_gap") == []
    assert ids(store, min_lost_tokens=1025) == ["cmpl-0004"]
    assert ids(store, min_expected_tokens=1, max_served_tokens=0) == ["cmpl-0004", "cmpl-0001"]


@pytest.mark.parametrize("query", [{}, {"engine": "inc-a1"}, {"cause": "drafter_fallback"}])
def test_pages_have_no_gaps_and_no_repeats(store: Store, query: dict[str, str]) -> None:
    # Four requests finish at each time: the cursor has to split ties as well.
    records = [
        factory.lost_record(index, A, finish=factory.START + index // 4) for index in range(22)
    ]
    store.append([batch(A, records)])
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = store.requests(RequestQuery(limit=5, cursor=cursor, **query))  # type: ignore[arg-type]
        seen += [record.request_id for record in page.records]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 22
    assert seen == ids(store, limit=100)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"sort": "newest"}, "7 6 5 4 3 2 1 0"),
        ({"sort": "oldest"}, "0 1 2 3 4 5 6 7"),
        ({"sort": "oldest", "engine": "inc-a1"}, "0 1 2 3 6 7"),
        # Equal numbers: newest first. Those without any are not there.
        ({"sort": "lost"}, "2 7 3 1 0"),
        ({"sort": "served"}, "5 4"),
        ({"sort": "expected"}, "2 7 5 4 3 1 0"),
        ({"sort": "lost", "min_lost_tokens": 1025}, "2 7"),
        ({"sort": "lost", "until": factory.START + 13}, "2 3 1 0"),
        ({"sort": "expected", "model": "other"}, "5 4"),
        ({"sort": "expected", "verdicts": ("full",)}, "5 4"),
        ({"sort": "expected", "cause": "drafter_fallback", "since": factory.START + 12}, "2 7 3"),
        ({"sort": "served", "verdicts": ("lost",)}, ""),
        ({"sort": "lost", "engine": "nobody"}, ""),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_orders(store: Store, query: dict[str, object], expected: str, limit: int) -> None:
    chunks = {2: 4, 7: 3}
    lost = [factory.lost_record(n, A, chunks=chunks.get(n, 2)) for n in (0, 1, 2, 3, 7)]
    served = [factory.served_record(n, B) for n in (4, 5)]
    store.append([batch(A, [*lost, factory.cold_record(6, A)]), batch(B, served)])
    assert {record.lost_tokens for record in lost} == {1024, 1536, 2048}
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = store.requests(RequestQuery(limit=limit, cursor=cursor, **query))  # type: ignore[arg-type]
        assert len(page.records) <= limit
        seen += [record.request_id.removeprefix("cmpl-000") for record in page.records]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == expected.split()


def test_no_cursor_after_an_exactly_full_page(store: Store) -> None:
    store.append([batch(A, [factory.cold_record(index, A) for index in range(2)])])
    assert store.requests(RequestQuery(limit=2)).next_cursor is None


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "_",
        "0x1p+0",
        "0x1p+0_",
        "zz_1",
        f"{AT}_{2**70}",
        "nan_1",
        "inf_1",
        "-inf_1",
        "10_1",
        f"{AT}_+1",
        f"{AT}_ 1",
        f"{AT}_1 ",
        f"oldest_{AT}_1",
        f"lost_5_{AT}_1",
        f"5_{AT}_1",
    ],
)
def test_foreign_cursors_are_refused(store: Store, cursor: str) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        store.requests(RequestQuery(cursor=cursor))


def test_a_cursor_of_another_order_is_refused(store: Store) -> None:
    store.append([batch(A, [factory.lost_record(index, A) for index in range(2)])])
    served = [factory.served_record(index, B) for index in range(2, 4)]
    store.append([batch(B, served)])
    cursors = {
        sort: store.requests(RequestQuery(limit=1, sort=sort)).next_cursor
        for sort in get_args(Sort)
    }
    for sort, cursor in itertools.product(cursors, cursors.values()):
        assert cursor is not None
        if cursor == cursors[sort]:
            assert len(store.requests(RequestQuery(sort=sort, cursor=cursor)).records) >= 1
            continue
        with pytest.raises(ValueError, match="in this sort order"):
            store.requests(RequestQuery(sort=sort, cursor=cursor))


def test_more_engines_than_are_merged(store: Store) -> None:
    fleet = [factory.engine(f"n:{n}", f"inc-{n}", model="big") for n in range(70)]
    store.append([batch(info, [factory.lost_record(n, info)]) for n, info in enumerate(fleet)])
    assert ids(store, model="big", limit=3) == ["cmpl-0069", "cmpl-0068", "cmpl-0067"]
    assert len(store.engines()) == 70


def test_engine_lifecycle(store: Store) -> None:
    store.append([batch(A, [factory.lost_record(1, A)], (ENGINE_STARTED, factory.START))])
    assert store.engine("inc-a1") == store.engine("node-a:0")
    gone = store.append([batch(A, [], (ENGINE_STOPPED, factory.START + 50))])
    assert gone.ended == [("inc-a1", factory.START + 50)]
    assert store.append([batch(A, [], (ENGINE_STOPPED, factory.START + 60))]).ended == []
    engine = store.engine("inc-a1")
    assert engine is not None
    assert (engine.ended_at, engine.end_reason) == (factory.START + 50, "stopped")


def test_a_later_incarnation_replaces_a_killed_one(store: Store) -> None:
    later = factory.engine(incarnation_id="inc-a2", started_at=factory.START + 100)
    store.append([batch(A, []), batch(B, [])])
    appended = store.append([batch(later, [])])
    assert appended.ended == [("inc-a1", factory.START + 100)]
    newest = store.engine("node-a:0")
    assert newest is not None
    assert newest.info == later
    old = store.engine("inc-a1")
    assert old is not None
    assert old.end_reason == "replaced"


def test_an_engine_that_is_not_heard_of_is_gone_until_it_is(store: Store) -> None:
    store.append([batch(A, [factory.lost_record(1, A)]), batch(B, [], (ENGINE_STOPPED, 60.0))])
    assert store.silence(time.time() - 60) == []
    ((ident, heard_at),) = store.silence(time.time() + 1)
    assert ident == "inc-a1"
    assert time.time() - 60 < heard_at <= time.time()
    assert store.silence(time.time() + 2) == []  # told once
    silent = store.engine("inc-a1")
    assert silent is not None
    assert (silent.ended_at, silent.end_reason) == (heard_at, "silent")
    assert silent.last_seen == factory.START + 11


def test_a_sign_of_life_takes_silence_back(store: Store) -> None:
    store.append([batch(A, [])])
    assert store.silence(time.time() - 1) == []
    while not store.silence(time.time()):
        pass  # until a clock tick lies between
    again = store.append([batch(A, [factory.lost_record(1, A)])])
    assert (len(again.records), again.ended) == (1, [])
    alive = store.engine("inc-a1")
    assert alive is not None
    assert (alive.ended_at, alive.end_reason) == (None, None)


@pytest.mark.parametrize("reason", ["stopped", "replaced"])
def test_silence_is_not_the_last_word(store: Store, reason: str) -> None:
    store.append([batch(A, [])])
    while not store.silence(time.time()):
        pass
    later = factory.engine(incarnation_id="inc-a2", started_at=factory.START + 100)
    last = (
        batch(A, [], (ENGINE_STOPPED, factory.START + 100))
        if reason == "stopped"
        else batch(later, [])
    )
    assert store.append([last]).ended == [("inc-a1", factory.START + 100)]
    store.append([batch(A, [factory.lost_record(1, A)])])  # late: it stays ended
    old = store.engine("inc-a1")
    assert old is not None
    assert (old.ended_at, old.end_reason) == (factory.START + 100, reason)


def test_changed_engine_info_is_kept(store: Store) -> None:
    store.append([batch(A, [])])
    changed = msgspec.structs.replace(A, lookup="corrected")
    store.append([batch(changed, [])])
    assert [engine.info for engine in store.engines()] == [changed]


def test_totals_weigh_sampled_requests(store: Store) -> None:
    sampled = msgspec.structs.replace(factory.served_record(1, B), sampling_probability=0.25)
    store.append([batch(B, [sampled, factory.served_record(2, B)])])
    totals = store.engines()[0].totals
    assert totals.requests == {"full": 5}
    assert totals.served_tokens == 5 * 1024
    assert totals.loads == sum(totals.reload_buckets) == 5
    assert totals.reload_seconds == pytest.approx(0.2)


def test_series(store: Store) -> None:
    start = factory.START
    store.append(
        [
            batch(A, [factory.lost_record(n, A, finish=start + 60 * n) for n in range(3)]),
            batch(B, [factory.served_record(9, B, finish=start + 59)]),
        ]
    )
    points = store.series(start, start + 179, 60, None)
    assert [(p.time - start, p.requests) for p in points] == [
        (0, {"lost": 1, "full": 1}),
        (60, {"lost": 1}),
        (120, {"lost": 1}),
    ]
    assert points[0].expected_tokens == 2048
    assert [p.lost_tokens for p in store.series(start + 60, start + 100, 60, "inc-a1")] == [1024]
    assert points[0].groups == {}  # group 0 of one model is not group 0 of another
    of_b = store.series(start, start + 179, 60, "node-b:0")[0]
    assert of_b.loads == 1
    assert {group: sums.loaded for group, sums in of_b.groups.items()} == {0: 2, 1: 1, 2: 1}
    assert store.series(start, start + 179, 60, "nobody") == []
    hourly = store.series(start, start + 179, 3600, None)
    assert sum(sum(point.requests.values()) for point in hourly) == 4


def test_records_after(store: Store) -> None:
    first = store.append([batch(A, [factory.lost_record(n, A) for n in range(3)])])
    after = store.records_after(first.records[0][0], 10)
    assert after == list(first.records[1:])
    assert len(store.records_after(0, 2)) == 2


def test_a_failed_batch_leaves_nothing(store: Store) -> None:
    stranger = Batch([], [], [RecordRow(factory.lost_record(1, B), b"{}")])
    with pytest.raises(KeyError):
        store.append([batch(A, [factory.lost_record(1, A)]), stranger])
    assert store.engines() == []
    assert len(store.append([batch(A, [factory.lost_record(1, A)])]).records) == 1


def test_reopened(open_store: Callable[[], Store]) -> None:
    with closing(open_store()) as first:
        first.append([batch(A, [factory.lost_record(1, A)])])
    with closing(open_store()) as second:
        assert second.append([batch(A, [factory.lost_record(1, A)])]).duplicates == 1
        assert second.engines()[0].totals.requests == {"lost": 1}
