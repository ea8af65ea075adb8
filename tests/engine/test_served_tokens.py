"""The same traffic on each engine, with vLLM's own lookup and with those of kvlens.

Eight prompts of 1,100 tokens, of which the GPU cache holds two; then the first again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from harness import AFFECTED, NEWEST, OLDEST, SERVERS, Server, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=8, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
REQUESTS = PLAN.documents + 1
SERVABLE = 1024
"""Two chunks of 512 tokens."""
STOCK, CORRECTED, EXACT = "stock", "corrected", "exact"
RUNS = [(version, lookup) for version in SERVERS for lookup in (STOCK, CORRECTED)]
RUNS += [(version, EXACT) for version in (AFFECTED, NEWEST)]
RunOf = Callable[[str, str], "Run"]


@dataclass(frozen=True)
class Run:
    """What one server gave and said about it."""

    texts: list[str]
    counters: dict[str, int]
    served: float | None
    servable: float | None
    lost: float | None
    lost_by_fallback: float | None
    errors: float | None


@pytest.fixture(scope="module")
def run_of(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Each run is made once, when the first test asks for it."""

    @cache
    def make(version: str, lookup: str) -> Run:
        folder = tmp_path_factory.mktemp(f"{version}-{lookup}")
        with serve(version, tiny_model, folder, {"lookup": lookup}) as server:
            return observe(server)

    return make


def observe(server: Server) -> Run:
    texts = []
    for number in range(REQUESTS):
        prompt = PLAN.prompt(number % PLAN.documents)
        texts.append(server.complete(prompt, PLAN.output_tokens, f"served-{number}"))
    counters = server.client.counters()
    server.flush(REQUESTS)
    lost = semconv.LOST_TOKENS.exposed_name
    return Run(
        texts,
        counters,
        served=server.metric(semconv.SERVED_TOKENS.exposed_name),
        servable=server.metric(semconv.SERVABLE_TOKENS.exposed_name),
        lost=server.metric(lost),
        lost_by_fallback=server.metric(lost, cause=str(semconv.Cause.DRAFTER_FALLBACK)),
        errors=server.metric(semconv.OBSERVER_ERRORS.exposed_name),
    )


@pytest.mark.parametrize("version", [OLDEST, AFFECTED])
def test_an_affected_engine_loses_every_hit(run_of: RunOf, version: str) -> None:
    run = run_of(version, STOCK)
    assert run.counters["stored_bytes"] > 0
    assert run.counters["loaded_bytes"] == 0
    assert run.counters["external_queries"] == REQUESTS * PLAN.prompt_tokens == 9900
    assert run.counters["external_hits"] == 0
    assert (run.served, run.servable) == (0, SERVABLE)
    assert run.lost == run.lost_by_fallback == SERVABLE


@pytest.mark.parametrize("version", [OLDEST, AFFECTED])
def test_an_affected_engine_serves_them_when_corrected(run_of: RunOf, version: str) -> None:
    check_all_served(run_of(version, CORRECTED))


@pytest.mark.parametrize("lookup", [STOCK, CORRECTED])
def test_the_newest_engine_serves_them_either_way(run_of: RunOf, lookup: str) -> None:
    check_all_served(run_of(NEWEST, lookup))


@pytest.mark.parametrize("version", [AFFECTED, NEWEST])
def test_exact_lookups_serve_them(run_of: RunOf, version: str) -> None:
    check_all_served(run_of(version, EXACT))


def check_all_served(run: Run) -> None:
    assert run.counters["loaded_bytes"] > 0
    assert run.counters["external_queries"] == REQUESTS * PLAN.prompt_tokens
    assert run.counters["external_hits"] == SERVABLE
    assert (run.served, run.servable, run.lost) == (SERVABLE, SERVABLE, 0)


def test_outputs_are_identical_in_all_runs(run_of: RunOf) -> None:
    reference = run_of(NEWEST, STOCK).texts
    assert len(set(reference)) == PLAN.documents
    assert reference[-1] == reference[0]
    for key in RUNS:
        assert run_of(*key).texts == reference


def test_observing_went_without_an_error(run_of: RunOf) -> None:
    assert [run_of(*key).errors for key in RUNS] == [0] * len(RUNS)
