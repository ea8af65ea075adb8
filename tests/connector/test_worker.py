from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import TransferResult

from kvlens.connector import worker

FAILS = "failed_jobs" in OffloadingWorkerMetadata.__dataclass_fields__


def test_each_finished_job_travels_with_its_size_and_time():
    results = [TransferResult(1, True, 10, 0.5), TransferResult(2, True, None, None)]
    connector_worker = SimpleNamespace(worker=SimpleNamespace(get_finished=lambda: results))
    worker.measure_jobs(connector_worker)
    assert connector_worker.worker.get_finished() is results
    meta = worker.with_transfers(connector_worker, OffloadingWorkerMetadata({1: 1, 2: 1}))
    assert meta.transfers == {1: (10, 0.5)}
    assert meta.completed_jobs == {1: 1, 2: 1}
    plain = OffloadingWorkerMetadata({3: 1})
    assert worker.with_transfers(connector_worker, plain) is plain
    assert worker.with_transfers(connector_worker, None) is None


@pytest.mark.skipif(not FAILS, reason="in this vLLM a transfer that fails ends the engine")
def test_failed_jobs_are_not_measured_and_stay_failed():
    results = [TransferResult(1, True, 10, 0.5), TransferResult(2, False, 20, 0.5)]
    connector_worker = SimpleNamespace(worker=SimpleNamespace(get_finished=lambda: results))
    worker.measure_jobs(connector_worker)
    connector_worker.worker.get_finished()
    stock = OffloadingWorkerMetadata({1: 1, 2: 1}, {2})
    meta = worker.with_transfers(connector_worker, stock)
    assert (meta.transfers, meta.failed_jobs) == ({1: (10, 0.5)}, {2})
    merged = meta.aggregate(OffloadingWorkerMetadata({2: 1, 3: 1}, {3}))
    assert (merged.failed_jobs, merged.completed_jobs) == ({2, 3}, {1: 1, 2: 2, 3: 1})
    assert merged.transfers == {1: (10, 0.5)}


def test_two_workers_add_bytes_and_the_slower_counts():
    first = worker.MeasuredWorkerMetadata({1: 1}, transfers={1: (10, 0.5)})
    second = worker.MeasuredWorkerMetadata({1: 1, 2: 1}, transfers={1: (30, 0.25), 2: (5, 1.0)})
    merged = first.aggregate(second)
    assert merged.completed_jobs == {1: 2, 2: 1}
    assert merged.transfers == {1: (40, 0.5), 2: (5, 1.0)}
    assert first.aggregate(OffloadingWorkerMetadata({1: 1})).transfers == {1: (10, 0.5)}
