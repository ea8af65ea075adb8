"""A real server of 0.32.0 whose private offloading modules have other names.

It serves what stock serves, token for token, and is recorded as deep as it can be.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import NEWEST, Server, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=4, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
REQUESTS = PLAN.documents + 1
VARIANTS = {
    "states": ([("rename", "_req_status"), ("rename", "group_states")], "interface"),
    "queries": (
        [("rename", "_sliding_window_lookup"), ("parameter", "_maximal_prefix_lookup")],
        "interface",
    ),
    "lookup": ([("parameter", "_lookup"), ("rename", "completed_jobs")], "groups"),
}


def texts(server: Server) -> list[str]:
    return [
        server.complete(PLAN.prompt(n % PLAN.documents), PLAN.output_tokens, f"next-{n}")
        for n in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def stock(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("stock")
    with serve(NEWEST, tiny_model, folder, {}, connector="OffloadingConnector") as server:
        return texts(server)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_serves_what_stock_serves(
    tiny_model: Path, tmp_path: Path, stock: list[str], variant: str
) -> None:
    changes, depth = VARIANTS[variant]
    env = {
        "PYTHONPATH": str(Path(__file__).parent / "next_release"),
        "KVLENS_TEST_MUTANT": json.dumps(changes),
    }
    with serve(NEWEST, tiny_model, tmp_path, {}, env=env) as server:
        assert texts(server) == stock
        server.flush(REQUESTS)
        assert server.metric(semconv.INFO.exposed_name, depth=depth, support="tested") == 1
        assert server.metric(semconv.SERVED_TOKENS.exposed_name) == 1024
        assert server.metric(semconv.OBSERVER_ERRORS.exposed_name) == 0
        assert server.log_lines("is gone") or server.log_lines("now takes")
        assert not server.log_lines("Traceback")
