"""Files below the host memory: what the first tier had to evict is served from disk.

The first tier has 16 slots and eight prompts need 40; every chunk is written to files as
well. A second engine then finds the files of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import NEWEST, Server, serve

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.dashboard.flight.recordings import load
from kvlens.telemetry import semconv
from kvlens.telemetry.records import RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=8, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
SLOTS = 16
SERVABLE = 1024
"""Two chunks of 512 tokens."""
THREADS = {"n_read_threads": 1, "n_write_threads": 1}


@dataclass(frozen=True)
class Life:
    """What one engine answered, counted and recorded."""

    texts: list[str]
    counters: dict[str, int]
    numbers: dict[str, float | None]
    records: dict[str, RequestRecord]


@pytest.fixture(scope="module")
def lives(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    """Two engines, one after the other, over one folder of files."""
    folder = tmp_path_factory.mktemp("tiers")
    documents = [*range(PLAN.documents), 0]
    return [
        live(tiny_model, folder, "first", documents),
        live(tiny_model, folder, "second", documents[:1]),
    ]


def live(tiny_model: Path, folder: Path, name: str, documents: list[int]) -> Life:
    recordings = folder / name
    with serve(
        NEWEST,
        tiny_model,
        folder,
        {"flight_recorder": str(recordings)},
        pool_bytes=8 * 2**20,
        extra_config={
            "spec_name": "HostMemoryTieringSpec",
            "spec_module_path": "kvlens.connector.host_tiers",
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "files"), **THREADS}],
        },
    ) as server:
        texts = [
            server.complete(PLAN.prompt(document), PLAN.output_tokens, f"{number}")
            for number, document in enumerate(documents)
        ]
        counters = server.client.counters()
        server.flush(len(texts))
        settle(server)
        numbers = {metric.name: server.metric(metric.exposed_name) for metric in semconv.METRICS}
        for tier in semconv.Tier:
            numbers[tier] = server.metric(semconv.TIER_TOKENS.exposed_name, tier=str(tier))
    (recording,) = load([recordings])
    records = {
        entry.record.request_id.removeprefix("cmpl-").removesuffix("-0"): entry.record
        for entry in recording
    }
    return Life(texts, counters, numbers, records)


def settle(server: Server) -> None:
    """Wait until ``/metrics`` has the last store as well."""

    def total(metric: semconv.Metric) -> float:
        return server.metric(metric.exposed_name) or 0

    server.flush_until(
        lambda: (
            total(semconv.STORED_CHUNKS)
            == total(semconv.RESIDENT_CHUNKS) + total(semconv.EVICTED_CHUNKS)
        )
    )


def test_what_the_first_tier_evicted_is_served_from_files(lives: list[Life]) -> None:
    first = lives[0]
    assert first.counters["external_hits"] == SERVABLE
    assert first.numbers[semconv.CAPACITY_CHUNKS.name] == SLOTS
    assert first.numbers[semconv.EVICTED_CHUNKS.name] > SLOTS
    assert first.numbers[semconv.Tier.DISK] == first.numbers[semconv.SERVED_TOKENS.name] == SERVABLE
    assert first.texts[-1] == first.texts[0]
    record = first.records[str(PLAN.documents)]
    assert (record.verdict, record.tier_tokens) == ("full", {"disk": SERVABLE})
    # The chunks were on their way up when the request first asked.
    exits = [lookup.exit for lookup in record.lookups]
    assert exits[-1] == semconv.Exit.SERVED
    assert semconv.Exit.DEFERRED_BACKEND in exits[:-1]


def test_the_next_engine_is_served_what_the_first_one_wrote(lives: list[Life]) -> None:
    first, second = lives
    assert second.texts == first.texts[:1]
    assert second.numbers[semconv.Tier.DISK] == SERVABLE
    record, earlier = second.records["0"], first.records["0"]
    assert (record.verdict, record.served_tokens) == ("full", SERVABLE)
    assert (earlier.verdict, earlier.served_tokens) == ("cold", 0)
    assert record.engine_id == earlier.engine_id
    assert record.incarnation_id != earlier.incarnation_id


def test_promotions_keep_the_numbers_whole(lives: list[Life]) -> None:
    for life in lives:
        stored = life.numbers[semconv.STORED_CHUNKS.name] or 0
        evicted = life.numbers[semconv.EVICTED_CHUNKS.name] or 0
        assert stored - evicted == life.numbers[semconv.RESIDENT_CHUNKS.name] > 0
        assert life.numbers[semconv.IDENTITY_VIOLATIONS.name] == 0
        assert life.numbers[semconv.OBSERVER_ERRORS.name] == 0
        assert life.numbers[semconv.LOST_TOKENS.name] == 0
