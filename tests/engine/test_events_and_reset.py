"""With KV events published and the offload tier emptied, the numbers still tell what is there.

The tier has 16 slots, so that most of eight prompts are evicted. The events are
vLLM's own account of the same stores and evictions, on another way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import kv_events
import pytest
from harness import NEWEST, Server, serve
from kv_events import REMOVED, STORED, Subscriber

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.traffic import Traffic
from kvlens.telemetry import semconv

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAN = Traffic(documents=8, rounds=1, prompt_tokens=1100, output_tokens=8, vocab=model.TINY.vocab)
SLOTS = 16
SERVABLE = 1024
"""Two chunks of 512 tokens."""


@pytest.fixture(scope="module")
def events() -> Iterator[Subscriber]:
    with kv_events.subscribe() as subscriber:
        yield subscriber


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, events: Subscriber, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("events")
    with serve(
        NEWEST,
        tiny_model,
        folder,
        {},
        pool_bytes=8 * 2**20,
        arguments=events.arguments,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    ) as running:
        for document in range(PLAN.documents):
            running.complete(PLAN.prompt(document), PLAN.output_tokens, f"cold-{document}")
        running.flush(PLAN.documents)
        running.flush_until(lambda: resident(running) == SLOTS)
        yield running


def total(server: Server, metric: semconv.Metric, **labels: str) -> int:
    return int(server.metric(metric.exposed_name, **labels) or 0)


def resident(server: Server) -> int:
    return total(server, semconv.RESIDENT_CHUNKS)


def balance(server: Server) -> tuple[int, int]:
    """Chunks stored, and where they are by the three numbers that have to add up to it."""
    there = (semconv.RESIDENT_CHUNKS, semconv.EVICTED_CHUNKS, semconv.RESET_CHUNKS)
    return total(server, semconv.STORED_CHUNKS), sum(total(server, metric) for metric in there)


def reset(server: Server, external: bool) -> None:
    """Empty the GPU's prefix cache, and the offload tier if ``external``."""

    def done() -> bool:
        answer = httpx.post(
            f"{server.url}/reset_prefix_cache",
            params={"reset_external": external},
            timeout=60,
            trust_env=False,
        )
        return bool(answer.raise_for_status().json()["success"])  # not while a block is held

    server.flush_until(done)


def test_kv_events_say_the_same_as_our_numbers(server: Server, events: Subscriber) -> None:
    assert total(server, semconv.CAPACITY_CHUNKS) == SLOTS
    stored, evicted = total(server, semconv.STORED_CHUNKS), total(server, semconv.EVICTED_CHUNKS)
    assert stored - evicted == resident(server) == SLOTS
    server.flush_until(lambda: events.offloaded(STORED) >= stored)
    assert (events.offloaded(STORED), events.offloaded(REMOVED)) == (stored, evicted)


def test_the_tier_is_empty_after_a_reset_and_fills_again(server: Server) -> None:
    last = PLAN.prompt(PLAN.documents - 1)
    reset(server, external=False)
    reloaded = server.complete(last, PLAN.output_tokens, "reloaded")
    assert server.client.counters()["external_hits"] == SERVABLE

    reset(server, external=True)
    server.flush_until(lambda: total(server, semconv.RESET_CHUNKS) >= SLOTS)
    assert (resident(server), total(server, semconv.RESET_CHUNKS)) == (0, SLOTS)
    recomputed = server.complete(last, PLAN.output_tokens, "recomputed")
    assert server.client.counters()["external_hits"] == SERVABLE
    server.flush_until(lambda: resident(server) > 0)

    reset(server, external=False)
    again = server.complete(last, PLAN.output_tokens, "again")
    server.flush_until(lambda: total(server, semconv.SERVED_TOKENS) >= 2 * SERVABLE)
    assert server.client.counters()["external_hits"] == 2 * SERVABLE
    assert reloaded == recomputed == again
    stored, there = balance(server)
    assert stored == there
    requests = semconv.REQUESTS
    assert total(server, requests, verdict=str(semconv.Verdict.FULL)) == 2
    # What was given up with the tier is nobody's loss.
    assert total(server, semconv.LOST_TOKENS) == total(server, semconv.EVICTED_TOKENS) == 0
    assert total(server, semconv.IDENTITY_VIOLATIONS) == 0
    assert total(server, semconv.OBSERVER_ERRORS) == 0
