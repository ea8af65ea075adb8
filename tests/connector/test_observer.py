"""What the hooks see of vLLM's own scheduler, and that they cannot hurt it."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from scheduling import Group, Request, add, build, served, store_all
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlens.connector import observer as observing
from kvlens.connector.observer import Observer
from kvlens.connector.worker import MeasuredWorkerMetadata
from kvlens.telemetry import facts

GROUPS = [Group("full_attention", 16), Group("mamba", 64)]


class Facts(list):
    def of(self, kind):
        return [facts.parse(fact) for fact in self if fact[0] == kind]


@pytest.fixture
def observed():
    scheduler = build(GROUPS, block_drop=False)
    sink = Facts()
    scheduler.observe(Observer(sink))
    return scheduler, sink


def blocks(*tables):
    return KVCacheBlocks(
        blocks=tuple(
            [SimpleNamespace(block_id=i, block_hash=None, is_null=i == 0) for i in table]
            for table in tables
        )
    )


def step(**changes):
    values = {
        "num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0,
        "finished_req_ids": set(), "preempted_req_ids": None,
        "scheduled_new_reqs": [], "kv_cache_block_copies": None,
        "kv_connector_block_state": None, "partial_tail_offloads": None,
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
        ),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_a_lookup_an_admission_and_a_load(observed):
    scheduler, sink = observed
    store_all(scheduler, Request("old", 130))
    request = Request("new-0123abcd", 130, trace_headers={"traceparent": "x"})
    assert served(scheduler, request) == 128
    scheduler.update_state_after_alloc(request, blocks(range(1, 9), [0, 9]), 128)

    (arrived,) = [f for f in sink.of(facts.ADDED) if f.request_id == request.request_id]
    assert (arrived.prompt_tokens, arrived.trace_headers) == (130, {"traceparent": "x"})
    (lookup,) = sink.of(facts.LOOKUP)
    assert (lookup.local_tokens, lookup.num_tokens, lookup.result) == (0, 130, 128)
    assert [(facts.group_of(key), *rest) for key, *rest in lookup.queries] == [
        (0, 8, 8, None), (1, 2, 2, 1),
    ]  # fmt: skip
    assert [length for _, length in lookup.keys] == [8, 2]
    assert lookup.end_ns >= lookup.time_ns
    (admitted,) = sink.of(facts.ADMITTED)
    assert (admitted.external_tokens, len(admitted.load_keys)) == (128, 9)

    meta = scheduler.build_connector_meta(step())
    assert list(meta.load_jobs) == [admitted.job_id]
    done = MeasuredWorkerMetadata(
        completed_jobs={admitted.job_id: 1}, transfers={admitted.job_id: (4096, 0.5)}
    )
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
    (moved,) = sink.of(facts.TRANSFERRED)
    assert (moved.job_id, moved.bytes, moved.seconds) == (admitted.job_id, 4096, 0.5)
    (loaded,) = sink.of(facts.LOADED)
    assert loaded.keys is admitted.load_keys


def test_a_store_its_job_and_its_completion(observed):
    scheduler, sink = observed
    request = Request("a", 40)
    status = add(scheduler, request)
    for group in status.group_states:
        group.block_ids = [1, 2]
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)
    meta = scheduler.build_connector_meta(step(finished_req_ids={"a"}))
    ((job_id, _),) = meta.store_jobs.items()
    scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=MeasuredWorkerMetadata({job_id: 1}))
    )

    (finished,) = sink.of(facts.FINISHED)
    assert (finished.num_tokens, finished.computed_tokens, finished.reason) == (40, 40, "stop")
    (offer,) = sink.of(facts.OFFERED)
    assert (offer.request_id, len(offer.offered), len(offer.accepted)) == ("a", 2, 2)
    (job,) = sink.of(facts.STORE_JOB)
    (stored,) = sink.of(facts.STORED)
    assert job.job_id == job_id
    assert stored.keys is job.keys
    assert stored.success


def test_a_refused_store_and_an_eviction():
    scheduler = build([Group("full_attention", 16)], block_drop=False, capacity=2)
    sink = Facts()
    scheduler.observe(Observer(sink))
    store_all(scheduler, Request("a", 32, seed=1))
    store_all(scheduler, Request("b", 16, seed=2))
    big = add(scheduler, Request("c", 64, seed=3))
    keys = big.group_states[0].offload_keys
    assert scheduler.manager.prepare_store(keys, big.req_context) is None
    first, second, third = sink.of(facts.OFFERED)
    assert (len(first.accepted), list(first.evicted)) == (2, [])
    assert len(second.evicted) == 1
    assert (len(third.offered), third.accepted) == (4, None)


def test_reset_and_preemption_are_seen(observed):
    scheduler, sink = observed
    scheduler.build_connector_meta(step(preempted_req_ids={"gone"}))
    scheduler.reset_cache()
    assert sink.of(facts.PREEMPTED)[0].request_ids == ("gone",)
    assert len(sink.of(facts.RESET)) == 1


def test_where_computing_starts_and_how_long_a_step_takes(observed):
    scheduler, sink = observed
    new = [SimpleNamespace(req_id="a", num_computed_tokens=128, block_ids=([], []))]
    prefill = step(num_scheduled_tokens={"a": 128}, total_num_scheduled_tokens=128)
    decode = step(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1)
    observer = scheduler.observer
    for output in (prefill, decode, step()):  # the last computes nothing: no output is awaited
        observer.scheduled(SimpleNamespace(store_jobs={}), output, scheduler)
    observer.scheduled(SimpleNamespace(store_jobs={}), step(scheduled_new_reqs=new), scheduler)
    for _ in range(3):
        observer.stepped()
    (timed,) = sink.of(facts.STEP)
    assert timed.tokens == 127
    assert timed.seconds > 0
    assert [fact.requests for fact in sink.of(facts.STARTED)] == [[("a", 128)]]


def test_vllms_own_account_of_an_admission(observed):
    scheduler, sink = observed
    request = Request("a", 130)
    add(scheduler, request)
    account = {"num_prompt_tokens": 130, "num_local_cached_tokens": 40}
    request.prefill_stats = SimpleNamespace(**account, num_external_cached_tokens=64)
    request.num_preemptions = 0
    served(scheduler, request)
    scheduler.update_state_after_alloc(request, blocks([], []), 0)
    request.num_preemptions = 1
    scheduler.update_state_after_alloc(request, blocks([], []), 0)
    first, again = sink.of(facts.ADMITTED)
    assert (first.local_tokens, first.other_tokens) == (40, 64)
    assert (again.local_tokens, again.other_tokens) == (None, 0)


def test_the_tiers_are_seen_where_vllm_asks_for_them(observed):
    scheduler, sink = observed
    if not hasattr(scheduler, "get_external_cache_hit_sources"):
        pytest.skip("this vLLM has none")
    store_all(scheduler, Request("old", 130))
    request = Request("new", 130)
    assert served(scheduler, request) == 128
    scheduler.update_state_after_alloc(request, blocks(range(1, 9), [0, 9]), 128)
    answer = scheduler.get_external_cache_hit_sources(request, 128)
    (tiers,) = sink.of(facts.TIERS)
    assert (tiers.request_id, tiers.tokens) == ("new", {"host": 128})
    assert {tier.value: count for tier, count in answer.items()} == tiers.tokens


def test_without_telemetry_vllms_own_methods_run():
    scheduler = build(GROUPS, settings={"lookup": "stock", "telemetry": False}, block_drop=False)
    for name in ("get_num_new_matched_tokens", "_maximal_prefix_lookup", "request_finished"):
        assert getattr(type(scheduler), name) is getattr(OffloadingConnectorScheduler, name)
    sink = Facts()
    scheduler.observe(Observer(sink))
    store_all(scheduler, Request("old", 130))
    assert served(scheduler, Request("new", 130)) == 128
    assert len(sink.of(facts.LOOKUP)) == 1


def test_the_manager_is_asked_nothing_by_us(observed):
    scheduler, _ = observed
    plain = build(GROUPS, block_drop=False)
    asked = {}
    for name, one in (("observed", scheduler), ("plain", plain)):
        store_all(one, Request("old", 130))
        keys, lookup = [], one.manager.lookup

        def record(key, context, keys=keys, lookup=lookup):
            keys.append(key)
            return lookup(key, context)

        one.manager.lookup = record
        assert served(one, Request("new", 130)) == 128
        asked[name] = keys
    assert asked["observed"] == asked["plain"]


class Broken(Facts):
    """A sink whose first use fails."""

    def append(self, fact):
        if fact[0] != facts.ERROR:
            raise RuntimeError("sink is broken")
        super().append(fact)


def test_no_error_of_ours_reaches_vllm(monkeypatch):
    scheduler, sink = build(GROUPS, block_drop=False), Broken()
    scheduler.observe(Observer(sink))
    monkeypatch.setattr(observing, "raise_errors", lambda: False)
    store_all(scheduler, Request("old", 130))
    request = Request("new", 130)
    assert served(scheduler, request) == 128
    scheduler.update_state_after_alloc(request, blocks(range(1, 9), [0, 9]), 128)
    scheduler.build_connector_meta(step())
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)
    where = {error.where for error in sink.of(facts.ERROR)}
    assert where >= {"added", "looked_up", "admitted", "offered", "stored", "finished"}
    assert {error.text for error in sink.of(facts.ERROR)} == {
        "RuntimeError: sink is broken; this hook is off until the engine restarts"
    }


def test_errors_of_ours_are_raised_in_tests():
    scheduler = build(GROUPS, block_drop=False)
    scheduler.observe(Observer(Broken()))
    assert "pytest" in sys.modules
    with pytest.raises(RuntimeError, match="sink is broken"):
        add(scheduler, Request("a", 40))
