"""Filters of requests together with an incident's scope."""

from __future__ import annotations

import msgspec
import pytest
from fastapi import HTTPException
from noticing import incident

from kvlens.dashboard.api.params import RequestParams
from kvlens.dashboard.model.incident import RequestScope
from kvlens.dashboard.store.sqlite import SqliteStore

SCOPE = RequestScope(
    since=100.0,
    until=200.0,
    min_expected_tokens=512,
    max_served_tokens=0,
    min_lost_tokens=64,
    verdicts=("lost", "partial"),
    cause="store_gap",
)


@pytest.fixture
def kept(store: SqliteStore) -> SqliteStore:
    store.save_detection(1, [incident(scope=SCOPE)], [])
    return store


def test_an_incidents_scope_is_taken_over(kept: SqliteStore) -> None:
    query = RequestParams(incident="zero_hit-1").query(kept, 10, None)
    expected = msgspec.structs.asdict(SCOPE)
    assert {name: getattr(query, name) for name in expected} == expected
    assert query.engine == "inc-a1"


def test_other_filters_narrow_it(kept: SqliteStore) -> None:
    narrow = RequestParams(
        incident="zero_hit-1",
        verdict=["lost", "full"],
        min_lost_tokens=100,
        since=150.0,
        cause="store_gap",
        engine="node-a:0",
    )
    query = narrow.query(kept, 10, None)
    assert (query.verdicts, query.min_lost_tokens) == (("lost",), 100)
    assert (query.since, query.until, query.cause) == (150.0, 200.0, "store_gap")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"verdict": ["full"]}, "verdict: the incident is about lost, partial"),
        ({"cause": "capacity"}, "cause: the incident is about store_gap"),
        ({"engine": "other"}, "is of another engine"),
    ],
)
def test_filters_that_leave_nothing_are_explained(
    kept: SqliteStore, given: dict[str, object], told: str
) -> None:
    with pytest.raises(HTTPException) as error:
        RequestParams(incident="zero_hit-1", **given).query(kept, 10, None)  # type: ignore[arg-type]
    assert error.value.status_code == 422
    assert told in error.value.detail


def test_without_an_incident_only_the_filters_count(kept: SqliteStore) -> None:
    query = RequestParams(verdict=["full"]).query(kept, 10, None)
    assert (query.verdicts, query.since, query.min_expected_tokens) == (("full",), None, 0)
