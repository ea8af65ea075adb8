"""What 0.33 added around the scheduler: synchronous loads, the manager's lock, its facts."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from scheduling import Group, Request, add, build, served, store_all
from test_observer import Facts, blocks, step
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlens.connector import compat, engine_facts, prom
from kvlens.connector.observer import Observer
from kvlens.connector.worker import MeasuredWorkerMetadata
from kvlens.telemetry import facts

GROUPS = [Group("full_attention", 16), Group("mamba", 64)]
MANAGER_FACTS = {facts.OFFERED, facts.STORED, facts.LOADED, facts.RESET}


class WatchingLock:
    """A lock that cannot be taken twice, as a tiered manager's."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        assert self._lock.acquire(blocking=False), "the manager's lock is taken twice"

    def __exit__(self, *_):
        self._lock.release()

    @property
    def held(self):
        return self._lock.locked()


def load(scheduler, request):
    """One step that loads all of ``request``; returns the load's job id."""
    assert served(scheduler, request) == 128
    scheduler.update_state_after_alloc(request, blocks(range(1, 9), [0, 9]), 128)
    return next(iter(scheduler.build_connector_meta(step()).load_jobs))


def complete(scheduler, job_id):
    report = MeasuredWorkerMetadata(completed_jobs={job_id: 1})
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


@pytest.mark.skipif(not compat.loads_synchronously(), reason="this vLLM has none")
def test_a_synchronous_load_is_told_apart():
    scheduler, sink = build(GROUPS, extra_config={"sync_load_budget_bytes": 1 << 30}), Facts()
    scheduler.observe(Observer(sink))
    store_all(scheduler, Request("old", 130))
    job_id = load(scheduler, Request("now", 130))
    complete(scheduler, job_id)
    (admitted,) = sink.of(facts.ADMITTED)
    (loaded,) = sink.of(facts.LOADED)
    assert admitted.synchronous
    assert loaded.keys is admitted.load_keys


def test_any_other_load_is_not_synchronous():
    scheduler, sink = build(GROUPS), Facts()
    scheduler.observe(Observer(sink))
    store_all(scheduler, Request("old", 130))
    load(scheduler, Request("now", 130))
    assert [fact.synchronous for fact in sink.of(facts.ADMITTED)] == [False]


@pytest.mark.skipif(
    not engine_facts.hashes_look_ahead(), reason="this vLLM's hashes do not look ahead"
)
def test_keys_that_vllm_computes_anew_stay_in_earlier_facts():
    scheduler, sink = build([Group("full_attention", 16)], lookahead=1), Facts()
    scheduler.observe(Observer(sink))
    request = Request("now", 130, lookahead=1, resumable=True)
    served(scheduler, request)
    (((keys, length),),) = (fact.keys for fact in sink.of(facts.LOOKUP))
    before = list(keys)
    request.seed = 2
    served(scheduler, request)
    first, second = sink.of(facts.LOOKUP)
    assert first.keys[0][0] == before
    assert length == second.keys[0][1] == 8
    assert set(second.keys[0][0]).isdisjoint(before)


@pytest.mark.skipif(not compat.locks_manager(), reason="this vLLM has none")
def test_facts_about_the_manager_are_noted_under_its_lock(monkeypatch):
    lock = WatchingLock()
    monkeypatch.setattr(CPUOffloadingManager, "lock", lock)
    held = []

    class Sink(Facts):
        def append(self, fact):
            held.append((fact[0], lock.held))
            super().append(fact)

    scheduler = build(GROUPS)
    scheduler.observe(Observer(Sink()))
    old = add(build(GROUPS), Request("old", 130))
    keys = [key for group in old.group_states for key in group.offload_keys]
    with lock:
        scheduler.manager.prepare_store(keys, old.req_context)
        scheduler.manager.complete_store(keys, old.req_context)
    request = Request("now", 130)
    job_id = load(scheduler, request)
    assert not lock.held
    complete(scheduler, job_id)
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)
    scheduler.build_connector_meta(step(finished_req_ids={"now"}))
    scheduler.reset_cache()
    assert not lock.held
    assert {kind for kind, _ in held} >= MANAGER_FACTS | {facts.LOOKUP}
    assert all(under for kind, under in held if kind in MANAGER_FACTS | {facts.LOOKUP})


def test_a_tiered_managers_promotions_are_seen():
    """It writes to its first tier under names bound before ours."""
    primary = build(GROUPS).manager
    primary.prepare_write, primary.complete_write = primary.prepare_store, primary.complete_store
    scheduler, sink = build(GROUPS), Facts()
    scheduler.manager = SimpleNamespace(primary_tier=primary)
    scheduler.observe(Observer(sink))
    context = add(build(GROUPS), Request("a", 130)).req_context
    keys = [b"key" + bytes(4)]
    primary.prepare_write(keys, context)
    primary.complete_write(keys, context, True)
    (offer,) = sink.of(facts.OFFERED)
    (stored,) = sink.of(facts.STORED)
    assert (offer.request_id, list(offer.accepted)) == ("", keys)
    assert (stored.keys, stored.success) == (keys, True)


def test_what_else_vllms_stats_carry_reaches_vllm(monkeypatch):
    """0.33 sends facts about the configuration beside the numbers."""
    seen = []
    monkeypatch.setattr(
        prom.OffloadPromMetrics, "observe", lambda self, data, engine: seen.append(data)
    )
    metrics = object.__new__(prom.KVLensPromMetrics)
    metrics._own = SimpleNamespace(observe=lambda series, engine: None)
    metrics.observe({"types": {}, "data": {}, "info": [{"policy": "lru"}]}, 0)
    assert seen == [{"types": {}, "data": {}, "info": [{"policy": "lru"}]}]
