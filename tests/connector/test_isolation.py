"""No error of ours, wherever it comes from, changes what vLLM's scheduler does."""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from scheduling import Group, Request, build, served, store_all
from test_observer import GROUPS, Facts, blocks, step
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlens.connector import observer as observing
from kvlens.connector import offloading, support, worker
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


HOOKS = sorted(
    name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_")
)
BY_HAND = {"looked_up", "asked", "asked_window", "status", "note_step"}
"""Contained without the wrapper, whose call lookups need not wait for; broken inside below."""
OFF = "; this hook is off until the engine restarts"
NOT_IN_THIS_LIFE = {"keep_keys", "failed", "fell_back", "promoted", "tiers"}
"""Errors of ours, the fallback to vLLM's lookup, and what other specs and log stats bring."""


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_changes_nothing_and_is_told(monkeypatch, hook):
    expected = life(build(GROUPS, block_drop=False))
    scheduler, taken = build(GROUPS, block_drop=False), Facts()

    def fails(self, *args, **kwargs):
        broken()

    fails.__name__ = hook
    wrapped = hasattr(getattr(Observer, hook), "__wrapped__")
    assert wrapped or hook in BY_HAND, "every hook is contained"
    monkeypatch.setattr(Observer, hook, observing.contained(fails))
    scheduler.observe(Observer(taken))
    assert life(scheduler) == expected
    told = {(error.where, error.text) for error in taken.of(facts.ERROR)}
    if hook in NOT_IN_THIS_LIFE:
        getattr(scheduler.observer, hook)(None)
        told = {(error.where, error.text) for error in taken.of(facts.ERROR)}
    assert told == {(hook, f"RuntimeError: ours{OFF}")}
    assert scheduler.observer.off == {hook}
    before = len(taken.of(facts.ERROR))
    getattr(scheduler.observer, hook)(None)
    assert len(taken.of(facts.ERROR)) == before, "a hook that raised is left out from then on"


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"monotonic_ns": broken},
        {"load_cap": broken},
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
    if sink is Facts and patch:
        assert {error.text for error in errors} == {f"RuntimeError: ours{OFF}"}
    else:
        assert not errors


def test_a_request_state_of_another_vllm_changes_nothing():
    """What a lookup reads of vLLM's own state is not there: one error, the same answer."""
    scheduler, sink = build([Group("full_attention", 16)], block_drop=False), Facts()
    scheduler.observe(Observer(sink))
    observer = scheduler.observer
    observer.looked_up(0, Request("a", 40), None, 0, 0, False, None)
    assert sink.of(facts.ERROR) == [], "vLLM has no state of this request: nothing to tell"
    observer.looked_up(0, None, SimpleNamespace(), 0, 0, False, None)
    observer.finished(Request("a", 40), None)
    assert [error.where for error in sink.of(facts.ERROR)] == ["looked_up", "finished"]


def test_residency_is_unknown_once_a_hook_that_keeps_it_is_off(monkeypatch):
    scheduler, sink = build(GROUPS, block_drop=False), Facts()
    scheduler.observe(Observer(sink))
    monkeypatch.setattr(observing, "getattr", broken, raising=False)
    scheduler.observer.offered([b"key" + bytes(4)], None, None)  # a context without an id
    assert [(lost.dropped, lost.state_lost) for lost in sink.of(facts.LOST)] == [(0, True)]


def test_stats_of_vllm_leave_without_ours_if_ours_fail(monkeypatch):
    theirs, sink = object(), Facts()
    monkeypatch.setattr(stock.OffloadingConnector, "get_kv_connector_stats", lambda self: theirs)
    connector = object.__new__(offloading.KVLensOffloadingConnector)
    connector._support = support.find()
    connector._recording = SimpleNamespace(stats=SimpleNamespace(take=broken))
    connector.connector_scheduler = SimpleNamespace(observer=Observer(sink))
    assert connector.get_kv_connector_stats() is theirs
    (error,) = sink.of(facts.ERROR)
    assert (error.where, error.text) == ("get_kv_connector_stats", "RuntimeError: ours")
    assert connector.get_kv_connector_stats() is theirs
    assert len(sink.of(facts.ERROR)) == 1, "what failed is left out from then on"


@pytest.fixture
def _nothing_logged_yet(monkeypatch):
    monkeypatch.setattr(worker, "_logged", set())
    monkeypatch.setattr(worker, "_errors", Counter())


@pytest.mark.usefixtures("_nothing_logged_yet")
def test_a_worker_that_cannot_be_measured_works_on(caplog):
    results = [SimpleNamespace(job_id=1)]  # says neither size nor time
    medium = SimpleNamespace(get_finished=lambda: results)
    connector_worker = SimpleNamespace(worker=medium)
    worker.measure_jobs(connector_worker)
    for _ in range(3):
        assert medium.get_finished() is results
    worker.measure_jobs(SimpleNamespace())  # has no medium
    assert [line.getMessage().partition(";")[0] for line in caplog.records] == [
        "kvlens: measuring transfers failed"
    ]
    # They travel with the next report, are added up over workers and become facts.
    report = worker.with_transfers(connector_worker, OffloadingWorkerMetadata({1: 1}))
    assert report.errors == {"measuring transfers": 4}
    assert worker.with_transfers(connector_worker, report) is report
    sink = Facts()
    output = KVConnectorOutput(kv_connector_worker_meta=report.aggregate(report))
    Observer(sink).transferred(output)
    assert [error.where for error in sink.of(facts.ERROR)] == ["worker"] * 8


@pytest.mark.usefixtures("_nothing_logged_yet")
def test_transfers_that_cannot_be_reported_or_merged_leave_vllms_report_whole(monkeypatch, caplog):
    plain = OffloadingWorkerMetadata({1: 1})
    ours = worker.MeasuredWorkerMetadata({1: 1}, transfers={1: (1, 1.0)})
    monkeypatch.setattr(worker, "_measured", broken)
    for _ in range(3):
        assert (
            worker.with_transfers(SimpleNamespace(kvlens_transfers={1: (1, 1.0)}), plain) is plain
        )
        assert ours.aggregate(plain).completed_jobs == {1: 2}
    assert [line.getMessage().partition(" failed")[0] for line in caplog.records] == [
        "kvlens: reporting transfers", "kvlens: merging the workers' transfers",
    ]  # fmt: skip
