"""Size and time of each transfer job, which vLLM only sums.

The worker's ``get_finished`` reports every job with its bytes and seconds;
they travel to the scheduler in vLLM's own worker metadata.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)

from kvlens.connector.observer import raise_errors

logger = logging.getLogger(__name__)

Transfers = dict[int, tuple[int, float]]
"""Job id -> (bytes, seconds)."""

_MAX_WAITING = 65_536


@dataclass
class MeasuredWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata with the transfers of the completed jobs."""

    transfers: Transfers = field(default_factory=dict)

    def aggregate(self, other: Any) -> MeasuredWorkerMetadata:
        """Merge two workers' reports: bytes add up, the slower one counts."""
        merged = super().aggregate(other)
        transfers = dict(self.transfers)
        for job_id, (size, seconds) in getattr(other, "transfers", {}).items():
            have_size, have_seconds = transfers.get(job_id, (0, 0.0))
            transfers[job_id] = (have_size + size, max(have_seconds, seconds))
        return MeasuredWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            transfers=transfers,
        )


def measure_jobs(connector_worker: Any) -> None:
    """Note every finished job of the medium's worker."""
    medium = connector_worker.worker
    get_finished = medium.get_finished
    waiting: Transfers = {}

    def measured() -> Any:
        results = get_finished()
        try:
            for result in results:
                size, seconds = result.transfer_size, result.transfer_time
                if size is not None and seconds is not None and len(waiting) < _MAX_WAITING:
                    waiting[result.job_id] = (int(size), float(seconds))
        except Exception:
            if raise_errors():
                raise
            medium.get_finished = get_finished  # the next ones would fail alike
            logger.exception("kvlens: transfers are no longer measured; serving is not affected")
        return results

    medium.get_finished = measured
    connector_worker.kvlens_transfers = waiting


def with_transfers(connector_worker: Any, meta: Any) -> Any:
    """``meta`` with the waiting transfers; ``meta`` itself when there are none."""
    waiting: Transfers | None = getattr(connector_worker, "kvlens_transfers", None)
    if meta is None or not waiting:
        return meta
    transfers = dict(waiting)
    waiting.clear()
    return MeasuredWorkerMetadata(
        completed_jobs=meta.completed_jobs,
        transfer_stats=meta.transfer_stats,
        transfers=transfers,
    )
