"""Size and time of each transfer job, which vLLM only sums.

The worker's ``get_finished`` reports every job with its bytes and seconds;
they travel to the scheduler in vLLM's own worker metadata.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)

from kvlens.connector.observer import raise_errors

logger = logging.getLogger(__name__)

Transfers = dict[int, tuple[int, float]]
"""Job id -> (bytes, seconds)."""

_MAX_WAITING = 65_536
_logged: set[str] = set()
_errors: Counter[str] = Counter()
"""Errors of this process that no report has told yet."""


@dataclass
class MeasuredWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata with the transfers of the completed jobs."""

    transfers: Transfers = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    """Errors of ours that were contained on this side, by what failed."""

    def aggregate(self, other: Any) -> OffloadingWorkerMetadata:
        """Merge two workers' reports: bytes add up, the slower one counts."""
        merged: OffloadingWorkerMetadata = super().aggregate(other)
        with _contained("merging the workers' transfers"):
            transfers = dict(self.transfers)
            for job_id, (size, seconds) in getattr(other, "transfers", {}).items():
                have_size, have_seconds = transfers.get(job_id, (0, 0.0))
                transfers[job_id] = (have_size + size, max(have_seconds, seconds))
            errors = Counter(self.errors) + Counter(getattr(other, "errors", {}))
            merged = _measured(merged, transfers, errors)
        return merged  # noqa: RET504 - the block above may have ended early


def measure_jobs(connector_worker: Any) -> None:
    """Note every finished job of the medium's worker."""
    with _contained("measuring transfers"):
        _measure_jobs(connector_worker)


def _measure_jobs(connector_worker: Any) -> None:
    medium = connector_worker.worker
    get_finished = medium.get_finished
    waiting: Transfers = {}

    def measured() -> Any:
        results = get_finished()
        with _contained("measuring transfers"):
            for result in results:
                size, seconds = result.transfer_size, result.transfer_time
                known = result.success and size is not None and seconds is not None
                if known and len(waiting) < _MAX_WAITING:
                    waiting[result.job_id] = (int(size), float(seconds))
        return results

    medium.get_finished = measured
    connector_worker.kvlens_transfers = waiting


def with_transfers(connector_worker: Any, meta: Any) -> Any:
    """``meta`` with the waiting transfers; ``meta`` itself when there is nothing to tell."""
    waiting: Transfers = getattr(connector_worker, "kvlens_transfers", {})
    if meta is None or not (waiting or _errors):
        return meta
    with _contained("reporting transfers"):
        transfers = dict(waiting)
        waiting.clear()
        meta = _measured(meta, transfers, Counter())
    return meta  # noqa: RET504 - the block above may have ended early


def _measured(
    meta: OffloadingWorkerMetadata, transfers: Transfers, errors: Counter[str]
) -> MeasuredWorkerMetadata:
    """``meta`` with ``transfers``, and with the errors that were contained in this process."""
    theirs = {part.name: getattr(meta, part.name) for part in fields(OffloadingWorkerMetadata)}
    measured = MeasuredWorkerMetadata(
        **theirs,
        transfers=transfers,
        errors=dict(errors + _errors),
    )
    _errors.clear()
    return measured


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Keep errors of ours away from vLLM: counted, logged once per kind; raised under pytest."""
    try:
        yield
    except Exception:
        if raise_errors():
            raise
        _errors[what] += 1
        if what not in _logged:
            _logged.add(what)
            logger.exception(
                "kvlens: %s failed; transfer times will be missing, serving is not affected", what
            )
