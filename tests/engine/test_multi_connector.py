"""Beside another connector that is asked first: what it serves is not ours, and not lost.

The neighbour has room for the last six prompts, kvlens' connector for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import NEWEST, TINY_OPTIONS, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.dashboard.flight.recordings import load
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=8, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
SERVABLE = 1024
"""Two chunks of 512 tokens."""
THEIRS, OURS = 2, 0
"""Documents asked again: the neighbour still has the one, and evicted the other."""
MIB = 2**20


def child(connector: str, module: str, pool_bytes: int, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemoryOffloadingSpec",
            "spec_module_path": "kvlens.connector.host_memory",
            "cpu_bytes_to_use": pool_bytes,
            "block_size": TINY_OPTIONS["chunk_tokens"],
            **extra,
        },
    }


def test_what_the_other_connector_serves_is_not_lost(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    connectors = [
        child("NeighbourConnector", "neighbour", 16 * MIB),
        child(
            "KVLensOffloadingConnector",
            "kvlens.connector",
            512 * MIB,
            kvlens={"flight_recorder": str(folder)},
        ),
    ]
    with serve(
        NEWEST,
        tiny_model,
        tmp_path,
        {},
        connector="MultiConnector",
        extra_config={"connectors": connectors},
        env={"PYTHONPATH": str(Path(__file__).parent), "VLLM_LOG_STATS_INTERVAL": "1"},
    ) as server:
        texts = [
            server.complete(PLAN.prompt(document), PLAN.output_tokens, f"multi-{document}")
            for document in range(PLAN.documents)
        ]
        for document in (THEIRS, OURS):
            again = server.complete(PLAN.prompt(document), PLAN.output_tokens, f"again-{document}")
            assert again == texts[document]
        server.flush(PLAN.documents + 2)
        assert server.client.counters()["external_hits"] == 2 * SERVABLE
        assert server.metric(semconv.SERVED_TOKENS.exposed_name) == SERVABLE
        other = str(semconv.Exit.OTHER_CONNECTOR)
        assert server.metric(semconv.LOOKUPS.exposed_name, exit=other) == 1
        for silent in (semconv.LOST_TOKENS, semconv.IDENTITY_VIOLATIONS, semconv.OBSERVER_ERRORS):
            assert server.metric(silent.exposed_name) == 0, silent.name
        # vLLM logs the numbers of each connector, without ours.
        server.flush_until(lambda: bool(server.log_lines("KV Transfer metrics: ")))
        lines = server.log_lines("KV Transfer metrics: ")
        assert not [line for line in lines if semconv.LOOKUPS.name in line]
        assert not server.log_lines("Traceback")
    (recording,) = load([folder])
    records = {entry.record.request_id: entry.record for entry in recording}
    theirs, ours = records[f"cmpl-again-{THEIRS}-0"], records[f"cmpl-again-{OURS}-0"]
    assert (theirs.verdict, theirs.lookups[-1].exit, theirs.served_tokens) == ("skipped", other, 0)
    assert (theirs.lost_tokens, theirs.other_tokens, theirs.loads) == (0, SERVABLE, [])
    assert (ours.verdict, ours.lookups[-1].exit, ours.served_tokens) == ("full", "served", SERVABLE)
