"""Boards and rules are what the code says, and ask only for what exists."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, urlsplit

import pytest

from grafana import generate, promql
from grafana.check import CheckError, check
from grafana.panels import SEARCH
from kvlens.dashboard.web.request_form import RequestForm
from kvlens.telemetry import semconv


def test_checked_in_files_are_what_the_code_generates(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "expr",
    [
        "rate(kvlens_served_tokens_total[5m]",
        "rate(kvlens_serve_tokens_total[5m])",
        "kvlens_served_tokens",
        "sum by (verdict) (rate(kvlens_lost_tokens_total[5m]))",
        'kvlens_lost_tokens_total{verdict="lost"}',
        "vllm:kv_offload_loaded_bytes_total",
        "kvlens_info / on (group) kvlens_capacity_chunks",
        "sum(rate(kvlens_served_tokens_total[5m])) > bool (kvlens_nothing)",
    ],
)
def test_a_wrong_name_is_refused(expr: str) -> None:
    with pytest.raises(CheckError, match=r"not PromQL|has|label"):
        check(expr)


def test_every_query_is_checked() -> None:
    for module in generate.BOARDS.values():
        board = json.loads(generate.encode(module.build()))
        found = list(generate.expressions(board))
        assert len(found) == len([title for title, expr in found if check(expr)]) > 10


def test_a_typo_does_not_survive_the_round_trip() -> None:
    text = generate.encode(generate.BOARDS["fleet"].build())
    assert generate.round_trip(text) == text
    for field in ('"legendFormat"', '"fieldConfig"', '"transparent"', '"gridPos"'):
        broken = text.replace(field, field[:-2] + '"', 1)
        assert generate.round_trip(broken) != broken


def test_every_metric_is_on_a_board_or_its_absence_is_explained() -> None:
    not_drawn = {
        semconv.RESET_CHUNKS: "only an emptied tier resets; `kvlens doctor` shows it",
        semconv.TIER_TOKENS: "one tier is the rule; docs/metrics.md has the query",
        semconv.GHOST_DISTANCE: "kvlens_hit_ratio answers the same question",
        semconv.REUSE_DISTANCE: "kvlens_hit_ratio answers the same question",
    }
    drawn = set()
    for module in generate.BOARDS.values():
        for _, expr in generate.expressions(json.loads(generate.encode(module.build()))):
            drawn |= check(expr)
    for metric in semconv.METRICS:
        names = {metric.exposed_name, f"{metric.name}_bucket"}
        on_board = bool(names & drawn)
        assert on_board != (metric in not_drawn), metric.name


def test_panel_titles_are_unique_on_a_board() -> None:
    for module in generate.BOARDS.values():
        board = json.loads(generate.encode(module.build()))
        titles = [panel["title"] for panel in board["panels"]]
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(titles)) == len(titles)
        assert len(set(numbers)) == len(numbers)
        for panel in board["panels"]:
            refs = [target["refId"] for target in panel.get("targets", ())]
            assert refs == ["A", "B", "C", "D"][: len(refs)]


def test_a_vllm_name_must_be_listed() -> None:
    with pytest.raises(KeyError, match="not in vllm_metrics"):
        promql.vllm("kv_offload_loads_total")


def test_links_use_parameters_that_the_request_search_knows() -> None:
    url = urlsplit(SEARCH)
    given = dict.fromkeys(dict(parse_qsl(url.query)), "2026-09-07T12:00:00.000Z")
    filters = RequestForm.parse(given)
    assert url.path.endswith("/requests")
    assert filters.active
    assert not filters.errors
    assert all(getattr(filters, name) for name in given)
