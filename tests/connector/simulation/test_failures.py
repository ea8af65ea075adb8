"""Transfers that fail, on vLLM's own scheduler and both sides of the connector."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from kvlens.connector.config import LookupMode
from kvlens.connector.simulation.driver import Result, simulate
from kvlens.connector.simulation.reading import parse

pytestmark = pytest.mark.skipif(
    "failed_jobs" not in OffloadingWorkerMetadata.__dataclass_fields__,
    reason="in this vLLM a transfer that fails ends the engine",
)
GROUPS = "{kind: full_attention, tokens_per_block: 16}, {kind: mamba, tokens_per_block: 64}"
ONCE = "{prompt: {seed: 1, tokens: 300}}"
EMPTY = "{reset_gpu_cache: true}"


def run(steps: list[str], more: str = "", mode: LookupMode = LookupMode.EXACT) -> Result:
    text = f"layout: {{groups: [{GROUPS}]}}\nmax_batched_tokens: 64\n{more}\n"
    return simulate(parse(f"{text}steps: [{', '.join(steps)}]"), "test", mode)


def backend(**state: str) -> str:
    return "{backend: {" + ", ".join(f"{name}: {value}" for name, value in state.items()) + "}}"


@pytest.mark.parametrize("mode", list(LookupMode))
def test_a_load_that_fails_is_not_served_and_its_tokens_are_computed(mode: LookupMode) -> None:
    result = run(
        [ONCE, EMPTY, backend(loads="fail"), ONCE, EMPTY, backend(loads="complete"), ONCE],
        "load_failure_policy: recompute",
        mode,
    )
    _, failed, after = result.requests
    assert (failed.verdict, failed.cause, failed.confidence) == (
        "lost", "transfer_failed", "certain",
    )  # fmt: skip
    assert (failed.served_tokens, failed.failed_tokens, failed.computed_tokens) == (0, 256, 300)
    assert failed.output_tokens == 8
    ((load, told),) = [(load, load.completed_at) for load in failed.loads]
    assert load.failed
    assert load.latency is None
    assert told is not None
    # vLLM does not ask the tier for this request again.
    assert [lookup.result for lookup in failed.lookups] == [256, 0]
    assert all(group.pass_number == 0 for group in failed.lookups[1].groups)
    assert (after.verdict, after.served_tokens, after.failed_tokens) == ("full", 256, 0)


def test_a_request_ends_with_its_failed_load_by_default() -> None:
    _, failed = run([ONCE, EMPTY, backend(loads="fail"), ONCE]).requests
    assert (failed.verdict, failed.cause, failed.computed_tokens) == (
        "lost", "transfer_failed", None,
    )  # fmt: skip
    assert (failed.served_tokens, failed.failed_tokens, failed.output_tokens) == (0, 256, 0)
    assert failed.finish_reason == "error"
    assert "the request ended with it" in failed.summary


def test_what_is_local_by_then_is_counted_as_local() -> None:
    """While the load is in flight another request computes the same prompt."""
    steps = [ONCE, EMPTY, backend(loads="fail"), "{prompt: {seed: 1, tokens: 300}, times: 2, "
             "together: true}"]  # fmt: skip
    result = run(steps, "load_failure_policy: recompute\ntransfer_steps: {load: 8}")
    for record in result.requests[1:]:
        there = record.local_tokens + record.served_tokens
        assert record.computed_tokens == record.prompt_tokens - there
        assert record.served_tokens == 0


def test_a_store_that_fails_is_not_resident() -> None:
    first, second, third = run(
        [backend(stores="fail"), ONCE, EMPTY, backend(stores="complete"), ONCE, EMPTY, ONCE]
    ).requests
    assert [store.failed for store in first.stores if store.job_id is not None] == [True] * sum(
        store.job_id is not None for store in first.stores
    )
    assert (second.verdict, second.cause, second.served_tokens) == (
        "unstored", "transfer_failed", 0,
    )  # fmt: skip
    assert resident(first) == {}
    assert (third.verdict, third.served_tokens) == ("full", 256)


def resident(record: Any) -> dict[int, int]:
    return {group: count for group, count in record.resident_chunks.items() if count}
