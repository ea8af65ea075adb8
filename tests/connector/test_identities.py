"""Long random runs of vLLM's own scheduler: whatever happens, the numbers add up."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from recording import Numbers
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from kvlens.connector.config import LookupMode
from kvlens.connector.simulation import driver
from kvlens.connector.simulation.reading import parse
from kvlens.connector.support import vllm_version
from kvlens.telemetry import semconv

FULL = "{kind: full_attention, tokens_per_block: 16}"
WINDOW = "{kind: sliding_window, tokens_per_block: 16, window: 64}"
MAMBA = "{kind: mamba, tokens_per_block: 64}"
STEPS = 60
FAILS = pytest.mark.skipif(
    "failed_jobs" not in OffloadingWorkerMetadata.__dataclass_fields__,
    reason="in this vLLM a transfer that fails ends the engine",
)
RECOMPUTE = "load_failure_policy: recompute"
POPS = "speculative: eagle\nlookahead_hashes: false"


def scenario(seed: int, groups: str, more: str, failing: bool) -> str:
    """Prompts that share prefixes, alone and together, aborted, and tiers that are emptied.

    ``failing``: transfers also fail, now and then.
    """
    rng, steps = random.Random(seed), []
    for _ in range(STEPS):
        if failing and rng.random() < 0.4:
            stores, loads = (rng.choice(["complete", "complete", "fail"]) for _ in range(2))
            steps.append(f"{{backend: {{stores: {stores}, loads: {loads}}}}}")
        draw = rng.random()
        if draw < 0.05:
            steps.append("{reset_offload_cache: true}")
        elif draw < 0.25:
            steps.append("{reset_gpu_cache: true}")
        else:
            tokens = rng.randrange(20, 400)
            prompt = f"{{seed: {rng.randrange(3)}, tokens: {tokens}"
            if rng.random() < 0.3:
                prompt += f", diverge_after: {rng.randrange(tokens)}"
            step = f"{{prompt: {prompt}}}, max_tokens: {rng.randrange(1, 40)}"
            if rng.random() < 0.3:
                step += f", times: {rng.randrange(2, 5)}, together: true"
            if rng.random() < 0.2:
                step += f", abort_after: {rng.choice((0.02, 0.1, 0.3))}"
            steps.append(step + "}")
    return f"layout: {{groups: [{groups}]}}\nsteps: [{', '.join(steps)}]\n{more}\n"


def total(numbers: Numbers, metric: semconv.Metric, *labels: str) -> float:
    return sum(
        value
        for (name, have), value in numbers.counters.items()
        if name == metric.name and have[: len(labels)] == labels
    )


@pytest.mark.parametrize(
    ("groups", "more"),
    [
        (FULL, "gpu_blocks: 60\noffload_prompt_only: false"),
        (f"{FULL}, {WINDOW}", "gpu_blocks: 120\nspeculative: eagle\naccepted_tokens: [2, 0, 1]"),
        (f"{FULL}, {MAMBA}", "gpu_blocks: 120\nmax_batched_tokens: 128"),
        pytest.param(f"{FULL}, {MAMBA}", f"gpu_blocks: 120\n{RECOMPUTE}", marks=FAILS),
        pytest.param(f"{FULL}, {WINDOW}", f"gpu_blocks: 120\n{RECOMPUTE}\n{POPS}", marks=FAILS),
        pytest.param(FULL, "gpu_blocks: 60\nload_failure_policy: fail", marks=FAILS),
    ],
    ids=["attention", "window", "mamba", "failing-mamba", "failing-window", "failing-attention"],
)
@pytest.mark.parametrize("mode", list(LookupMode))
def test_the_numbers_add_up(monkeypatch, groups, more, mode):
    numbers = Numbers()

    class Counting(driver.Records):
        def count(self, metric, value=1, labels=()):
            super().count(metric, value, labels)
            numbers.count(metric, value, labels)

        def gauge(self, metric, value, labels=()):
            super().gauge(metric, value, labels)
            numbers.gauge(metric, value, labels)

    monkeypatch.setattr(driver, "Records", Counting)
    text = scenario(
        3,
        groups,
        f"{more}\ncapacity_chunks: 40\ntransfer_steps: {{store: 2, load: 2}}",
        failing="load_failure_policy" in more,
    )
    result = driver.simulate(parse(text), "identities", mode)

    assert total(numbers, semconv.IDENTITY_VIOLATIONS) == 0
    assert len(result.requests) >= STEPS
    ran = [record for record in result.requests if record.computed_tokens is not None]
    for record in ran:
        there = record.local_tokens + record.served_tokens
        # After a full hit the last token is computed all the same.
        assert record.computed_tokens == max(1, record.prompt_tokens - there), record
    for record in result.requests:
        for lookup in record.lookups:
            for group in lookup.groups:
                assert 0 <= (group.raw_hits or 0) <= group.width or not group.pass_number
    for kv_group in range(groups.count("kind")):
        label = str(kv_group)
        resident = next(
            value
            for (name, labels), value in numbers.gauges.items()
            if name == semconv.RESIDENT_CHUNKS.name and labels[0] == label
        )
        gone = total(numbers, semconv.EVICTED_CHUNKS, label)
        gone += total(numbers, semconv.RESET_CHUNKS, label)
        assert total(numbers, semconv.STORED_CHUNKS, label) == resident + gone
        assert gone > 0
    assert sum(record.served_tokens for record in ran) > 0
    assert sum(record.ghost_chunks for record in result.requests) > 0
    if "load_failure_policy" in more:
        assert sum(record.failed_tokens for record in result.requests) > 0
        assert any(store.failed for record in result.requests for store in record.stores)
    if vllm_version() >= "0.32":
        told = total(numbers, semconv.TIER_TOKENS)
        assert told in (0, total(numbers, semconv.SERVED_TOKENS))  # 0: without log stats
