"""Two tensor parallel workers are one engine; two data parallel engines are two.

Without binding, since vLLM gives each worker a NUMA node of its own and few machines
that run tests have two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from harness import FLUSH_SECONDS, NEWEST, Server, serve

from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.dashboard.flight.recordings import Recording, load
from kvlens.telemetry import semconv
from kvlens.telemetry.records import RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=4, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
DOCUMENTS = [*range(PLAN.documents), 0]
SERVABLE = 1024
"""Two chunks of 512 tokens."""
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Run:
    """What one server answered, counted (per engine) and recorded."""

    texts: list[str]
    counters: dict[str, int]
    numbers: dict[str, dict[str, float | None]]
    recordings: list[Recording]

    def records(self, engine: int) -> dict[str, RequestRecord]:
        """Records of the engine at this place in :attr:`recordings`, by request id."""
        return {
            entry.record.request_id: entry.record
            for entry in self.recordings[engine]
            if "flush" not in entry.record.request_id
        }


def ask(server: Server, rank: int, prompt: list[int], tokens: int, request_id: str) -> str:
    """Greedy completion by one engine."""
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={
            "model": engine.MODEL_NAME,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
        },
        headers={"X-Request-Id": request_id, "X-data-parallel-rank": str(rank)},
        timeout=120,
        trust_env=False,
    )
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


def flush(server: Server, rank: int, requests: int) -> None:
    """Wait for the numbers of one engine, which leave it with its own steps only."""
    deadline = time.monotonic() + FLUSH_SECONDS
    name, label = semconv.REQUESTS.exposed_name, str(rank)
    while (server.metric(name, engine=label) or 0) < requests:
        assert time.monotonic() < deadline, server.log.read_text(errors="replace")[-2000:]
        ask(server, rank, [model.FIRST_WORD], 1, "flush")


def run(tiny_model: Path, folder: Path, argument: str, asked: list[tuple[int, int]]) -> Run:
    """Serve ``asked``, pairs of rank and document, with ``argument`` 2."""
    recordings = folder / "recordings"
    with serve(
        NEWEST,
        tiny_model,
        folder,
        {"flight_recorder": str(recordings)},
        arguments=(argument, "2"),
        env=UNBOUND,
    ) as server:
        texts = [
            ask(server, rank, PLAN.prompt(document), PLAN.output_tokens, f"{number}")
            for number, (rank, document) in enumerate(asked)
        ]
        counters = server.client.counters()
        ranks = sorted({rank for rank, _ in asked})
        for rank in ranks:
            flush(server, rank, sum(1 for other, _ in asked if other == rank))
        numbers = {
            str(rank): {
                metric.name: server.metric(
                    metric.exposed_name + ("_count" if metric.type == "histogram" else ""),
                    engine=str(rank),
                )
                for metric in semconv.METRICS
            }
            for rank in ranks
        }
    found = sorted(load([recordings]), key=lambda recording: recording.engine.engine_id)
    return Run(texts, counters, numbers, found)


@pytest.fixture(scope="module")
def data_parallel(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    asked = [*[(0, document) for document in DOCUMENTS], (1, 0)]
    return run(tiny_model, tmp_path_factory.mktemp("dp"), "--data-parallel-size", asked)


@pytest.fixture(scope="module")
def tensor_parallel(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    asked = [(0, document) for document in DOCUMENTS]
    return run(tiny_model, tmp_path_factory.mktemp("tp"), "--tensor-parallel-size", asked)


def test_each_data_parallel_engine_has_its_own_numbers(data_parallel: Run) -> None:
    first, second = data_parallel.numbers["0"], data_parallel.numbers["1"]
    assert first[semconv.SERVED_TOKENS.name] == SERVABLE
    assert second[semconv.SERVED_TOKENS.name] == 0
    assert data_parallel.counters["external_hits"] == SERVABLE
    for numbers in (first, second):
        assert numbers[semconv.IDENTITY_VIOLATIONS.name] == 0
        assert numbers[semconv.OBSERVER_ERRORS.name] == 0
        assert numbers[semconv.LOST_TOKENS.name] == 0


def test_each_data_parallel_engine_has_its_own_name(data_parallel: Run) -> None:
    engines = [recording.engine for recording in data_parallel.recordings]
    assert [(info.engine_id, info.dp_rank, info.devices) for info in engines] == [
        ("test_dp0", 0, 1),
        ("test_dp1", 1, 1),
    ]
    assert len({info.incarnation_id for info in engines}) == 2
    first, second = data_parallel.records(0), data_parallel.records(1)
    assert {record.dp_rank for record in first.values()} == {0}
    assert {record.dp_rank for record in second.values()} == {1}
    assert len(first) == len(DOCUMENTS)
    # What rank 0 stored is not rank 1's: the prompt is new to it.
    assert [record.verdict for record in second.values()] == ["cold"]
    assert data_parallel.texts[-1] == data_parallel.texts[0]


def test_two_workers_serve_the_same_as_one(tensor_parallel: Run, data_parallel: Run) -> None:
    # An engine of the other server has one worker.
    assert tensor_parallel.texts == data_parallel.texts[: len(DOCUMENTS)]
    numbers, alone = tensor_parallel.numbers["0"], data_parallel.numbers["0"]
    for metric in (
        semconv.SERVED_TOKENS,
        semconv.SERVABLE_TOKENS,
        semconv.STORED_CHUNKS,
        semconv.SERVED_CHUNKS,
        semconv.RELOAD_LATENCY,
        semconv.TRANSFER_SECONDS,
    ):
        assert numbers[metric.name] == alone[metric.name] > 0, metric.name
    assert numbers[semconv.IDENTITY_VIOLATIONS.name] == 0
    assert numbers[semconv.OBSERVER_ERRORS.name] == 0


def test_two_workers_make_one_record(tensor_parallel: Run, data_parallel: Run) -> None:
    (recording,) = tensor_parallel.recordings
    assert recording.engine.devices == 2
    together, alone = tensor_parallel.records(0), data_parallel.records(0)
    assert together.keys() == alone.keys()
    for request_id, record in together.items():
        for mine, other in (
            (record.stores, alone[request_id].stores),
            (record.loads, alone[request_id].loads),
        ):
            # Each worker has half of the heads: together they move the same bytes.
            assert [job.bytes for job in mine] == [job.bytes for job in other], request_id
            assert all((job.transfer_seconds or 0) > 0 for job in mine if job.bytes)
    assert (
        sum(load.bytes or 0 for r in together.values() for load in r.loads)
        == (tensor_parallel.counters["loaded_bytes"])
    )
