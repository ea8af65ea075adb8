"""Records with wild values in any place: rejected or taken, and every answer after it stands."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import exports
import factory
import httpx
import pytest

from kvlens.telemetry import semconv
from kvlens.telemetry.records import encode

INFO = factory.engine()
BASES = [
    json.loads(encode(make(number, INFO)))
    for number, make in enumerate((factory.lost_record, factory.served_record, factory.cold_record))
]
WILD: list[Any] = [
    0,
    -1,
    1,
    1000,
    2**31,
    2**39,
    2**40,
    2**53,
    2**64,
    2**70,
    -(2**70),
    0.5,
    1e308,
    -1e308,
    5e-324,
    "",
    "x" * 600,
    "\ud7ff",
    "<b>",
    "lost",
    "partial",
    "stalled",
    "evicted",
    "unsafe",
    "skipped",
    None,
    True,
    [],
    [[]],
    [[3, 1]],
    [[0, 2**60]],
    {},
    {"a": {"b": 1}},
    {"0": 1},
    {"-1": 5},
    {"99999999999999999999": 1},
]
ANSWERS = ("engines", "incidents", "requests?limit=1000", "export", "export?format=csv", "series")

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where a value can be changed."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*place, key)
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*place, key))


def spoil(value: Any, rng: random.Random) -> None:
    """Put something wild into one place, mostly of the type that belongs there."""
    *way, last = rng.choice(list(places(value)))
    for key in way:
        value = value[key]
    old = value[last]
    fitting = [wild for wild in WILD if old is None or isinstance(wild, type(old))]
    value[last] = copy.deepcopy(rng.choice(fitting if fitting and rng.random() < 0.9 else WILD))


@pytest.mark.parametrize("seed", range(3))
def test_wild_values(client: httpx.Client, seed: int) -> None:
    rng = random.Random(seed)
    taken = 0
    for number in range(250):
        record, engine = copy.deepcopy(rng.choice(BASES)), json.loads(encode(INFO))
        record["internal_request_id"] = f"wild-{number}"
        if rng.random() < 0.2:
            engine["incarnation_id"] = record["incarnation_id"] = f"inc-{number % 7}"
            spoil(engine, rng)
        for _ in range(rng.randint(1, 3)):
            spoil(record, rng)
        span = exports.span(
            rng.choice([semconv.SPAN_REQUEST, semconv.SPAN_REQUEST, semconv.SPAN_DEFERRAL]),
            factory.START,
            {semconv.ATTR_RECORD: json.dumps(record)},
            (f"{1:032x}", f"{1:016x}"),
        )
        body = exports.export(INFO, span)
        body["resourceSpans"][0]["resource"]["attributes"] = [
            exports.attribute(semconv.ATTR_ENGINE, json.dumps(engine))
        ]
        answer = client.post(
            "/v1/traces",
            content=exports.as_json(body),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 200, (record, engine)
        taken += answer.json() == {}
    assert taken > 20
    for path in ANSWERS:
        assert client.get(f"/api/v1/{path}").status_code == 200, path
    for record in client.get("/api/v1/requests?limit=1000").json()["requests"]:
        ident = record["internal_request_id"]
        assert client.get(f"/requests/{ident}").status_code == 200, record
    assert client.get("/").status_code == 200
    assert "kvlens_dashboard_errors_total 0.0" in client.get("/metrics").text
