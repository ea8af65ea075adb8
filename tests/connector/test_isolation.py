"""No error of ours, wherever it comes from, changes what vLLM's scheduler does."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from scheduling import Group, Request, build, served, store_all
from test_observer import GROUPS, Facts, blocks, step
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as stock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlens.connector import observer as observing
from kvlens.connector import offloading, worker
from kvlens.connector.observer import Observer
from kvlens.telemetry import facts


@pytest.fixture(autouse=True)
def production(monkeypatch):
    """Contain errors of ours, as outside tests."""
    for module in (observing, offloading, worker):
        monkeypatch.setattr(module, "raise_errors", lambda: False)


def broken(*_args, **_kwargs):
    raise RuntimeError("ours")


class Deaf(Facts):
    """Takes no fact at all."""

    append = broken


def life(scheduler):
    """What the scheduler answers over the life of some requests."""
    asked = []
    lookup = scheduler.manager.lookup

    def record(key, context):
        asked.append(key)
        return lookup(key, context)

    scheduler.manager.lookup = record
    store_all(scheduler, Request("old", 130))
    new = Request("new", 130)
    answers = [served(scheduler, new), served(scheduler, Request("cold", 130, seed=2))]
    scheduler.update_state_after_alloc(new, blocks(range(1, 9), [0, 9]), 128)
    meta = scheduler.build_connector_meta(step(preempted_req_ids={"gone"}))
    loads = sorted(meta.load_jobs)
    done = worker.MeasuredWorkerMetadata(dict.fromkeys(loads, 1), transfers={loads[0]: (1, 1.0)})
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
    new.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(new)
    meta = scheduler.build_connector_meta(step(finished_req_ids={"new"}))
    scheduler.reset_cache()
    return answers, asked, loads, len(meta.store_jobs), served(scheduler, Request("again", 130))


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"monotonic_ns": broken},
        {"compat": SimpleNamespace(load_cap=broken)},
        {"bool": broken},
        {"len": broken},
        {"str": broken},
        {"getattr": broken},
    ],
)
@pytest.mark.parametrize("sink", [Facts, Deaf])
def test_hooks_that_fail_change_nothing(monkeypatch, patch, sink):
    expected = life(build(GROUPS, block_drop=False))
    scheduler, taken = build(GROUPS, block_drop=False), sink()
    scheduler.observe(Observer(taken))
    for name, value in patch.items():
        monkeypatch.setattr(observing, name, value, raising=False)
    assert life(scheduler) == expected
    errors = taken.of(facts.ERROR)
    if sink is Facts and patch and "monotonic_ns" not in patch:
        assert {error.text for error in errors} == {"RuntimeError: ours"}
    else:
        assert not errors


def test_a_request_state_of_another_vllm_changes_nothing():
    """What a lookup reads of vLLM's own state is not there: one error, the same answer."""
    scheduler, sink = build([Group("full_attention", 16)], block_drop=False), Facts()
    scheduler.observe(Observer(sink))
    observer = scheduler.observer
    observer.looked_up(0, Request("a", 40), None, 0, 0, False, None)
    observer.looked_up(0, None, SimpleNamespace(), 0, 0, False, None)
    observer.finished(Request("a", 40), None, False)
    assert [error.where for error in sink.of(facts.ERROR)] == ["looked_up", "looked_up", "finished"]


def test_stats_of_vllm_leave_without_ours_if_ours_fail(monkeypatch):
    theirs, sink = object(), Facts()
    monkeypatch.setattr(stock.OffloadingConnector, "get_kv_connector_stats", lambda self: theirs)
    connector = object.__new__(offloading.KVLensOffloadingConnector)
    connector._stats = SimpleNamespace(take=broken)
    connector.connector_scheduler = SimpleNamespace(observer=Observer(sink))
    assert connector.get_kv_connector_stats() is theirs
    (error,) = sink.of(facts.ERROR)
    assert (error.where, error.text) == ("get_kv_connector_stats", "RuntimeError: ours")


def test_a_worker_that_cannot_be_measured_works_on(caplog):
    results = [SimpleNamespace(job_id=1)]  # says neither size nor time
    medium = SimpleNamespace(get_finished=lambda: results)
    connector_worker = SimpleNamespace(worker=medium)
    worker.measure_jobs(connector_worker)
    for _ in range(3):
        assert medium.get_finished() is results
    assert sum("no longer measured" in line.message for line in caplog.records) == 1
