from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvlens.dashboard.demo.report import (
    Arm,
    checks,
    cold_texts,
    summarise,
    table,
    to_json,
)
from kvlens.dashboard.demo.traffic import TimedAnswer

INCIDENT: dict[str, Any] = {
    "kind": "zero_hit",
    "state": "open",
    "cause": "drafter_fallback",
    "evidence": {"drafter_groups": [0, 1, 2, 3, 4]},
}
STOCK = Arm(
    stored_bytes=1000,
    loaded_bytes=0,
    external_queries=100,
    external_hits=0,
    served_tokens=0,
    servable_tokens=80,
    reload_seconds=2.0,
    recompute_seconds=2.0,
    outputs_identical=True,
    incidents=[INCIDENT],
    records=13,
    requests=13,
)
KVLENS = replace(
    STOCK,
    loaded_bytes=800,
    external_hits=80,
    served_tokens=80,
    reload_seconds=0.2,
    incidents=[],
)


def failed(stock: Arm = STOCK, kvlens: Arm = KVLENS) -> list[str]:
    return [check.what for check in checks(stock, kvlens) if not check.holds]


def test_the_whole_story_holds() -> None:
    assert failed() == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"stored_bytes": 0}, "KV is stored"),
        ({"loaded_bytes": 1}, "nothing is loaded"),
        ({"served_tokens": 1}, "0 tokens served"),
        ({"servable_tokens": 0}, "0 tokens served"),
        ({"incidents": []}, "one open incident"),
        ({"incidents": [INCIDENT, INCIDENT]}, "one open incident"),
        ({"incidents": [INCIDENT, {**INCIDENT, "kind": "lost_hits"}]}, "one open incident"),
        ({"incidents": [{**INCIDENT, "state": "closed"}]}, "one open incident"),
        ({"incidents": [{**INCIDENT, "cause": "window_veto"}]}, "one open incident"),
        ({"incidents": [{**INCIDENT, "evidence": {}}]}, "one open incident"),
        ({"outputs_identical": False}, "outputs are identical"),
        ({"records": 12}, "stock: the dashboard has the record"),
    ],
)
def test_what_the_stock_arm_does_not_show_is_named(change: dict[str, Any], what: str) -> None:
    [name] = failed(stock=replace(STOCK, **change))
    assert what in name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"served_tokens": 79}, "everything that could be served"),
        ({"served_tokens": 0, "servable_tokens": 0}, "everything that could be served"),
        ({"loaded_bytes": 0}, "KV is loaded"),
        ({"incidents": [{**INCIDENT, "state": "closed"}]}, "kvlens: no incident"),
        ({"outputs_identical": False}, "outputs are identical"),
        ({"reload_seconds": 2.0}, "reloading is faster"),
        ({"records": 0}, "kvlens: the dashboard has the record"),
    ],
)
def test_what_the_kvlens_arm_does_not_show_is_named(change: dict[str, Any], what: str) -> None:
    [name] = failed(kvlens=replace(KVLENS, **change))
    assert what in name


def test_an_arm_is_summed_from_its_parts() -> None:
    answers = [
        TimedAnswer(0, 0, 2.0, "a"),
        TimedAnswer(0, 1, 4.0, "b"),
        TimedAnswer(1, 0, 0.1, "a"),
        TimedAnswer(1, 1, 0.3, "b"),
    ]
    counters = {"stored_bytes": 9, "loaded_bytes": 8, "external_queries": 7, "external_hits": 6}
    records = [{"served_tokens": 1, "servable_tokens": 2}] * 4
    arm = summarise(counters, records, [INCIDENT], answers, cold_texts(answers), requests=5)
    assert arm == Arm(
        **counters,
        served_tokens=4,
        servable_tokens=8,
        reload_seconds=0.2,
        recompute_seconds=3.0,
        outputs_identical=True,
        incidents=[INCIDENT],
        records=4,
        requests=5,
    )
    other = summarise(counters, records, [], answers, {0: "a", 1: "c"}, requests=5)
    assert not other.outputs_identical


def test_the_json_document_carries_both_arms_and_what_failed() -> None:
    document = json.loads(json.dumps(to_json("0.29.0", replace(STOCK, stored_bytes=0), KVLENS)))
    assert document["vllm_version"] == "0.29.0"
    assert document["arms"]["kvlens"]["served_tokens"] == 80
    assert document["arms"]["stock"]["incidents"] == [INCIDENT]
    assert document["failed"] == ["stock: KV is stored"]


def test_the_table_shows_both_arms() -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(table("0.29.0", STOCK, KVLENS))
    text = output.getvalue()
    assert "0 of 80" in text
    assert "80 of 80" in text
    assert "zero_hit: drafter_fallback" in text
