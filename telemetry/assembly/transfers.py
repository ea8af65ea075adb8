"""Stores and loads: which job moved which chunks of which request, and how long it took.

vLLM hands the same key set to the job and to the manager's ``complete_*``, so
a completion is matched to its job by that object, which is held until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvlens.telemetry import facts
from kvlens.telemetry.records import GroupChunks, Load, Store

MAX_JOBS = 100_000
"""Jobs in flight that are remembered; older ones lose their timing, nothing else."""

T = TypeVar("T", Store, Load)


@dataclass
class Job(Generic[T]):
    """A job in flight."""

    job_id: int
    request_id: str
    keys: facts.Keys
    record: T


class Jobs(Generic[T]):
    """Jobs in flight, found by id or by their key set."""

    def __init__(self) -> None:
        self._by_keys: dict[int, Job[T]] = {}
        self._by_id: dict[int, Job[T]] = {}

    def start(self, job: Job[T]) -> None:
        """Remember a job until it completes."""
        if len(self._by_id) >= MAX_JOBS:
            oldest = next(iter(self._by_id.values()))
            self.end(oldest)
        self._by_keys[id(job.keys)] = job
        self._by_id[job.job_id] = job

    def of_keys(self, keys: facts.Keys) -> Job[T] | None:
        """The job that moved this very key set."""
        job = self._by_keys.get(id(keys))
        return job if job is not None and job.keys is keys else None

    def of_id(self, job_id: int) -> Job[T] | None:
        """The job with this id."""
        return self._by_id.get(job_id)

    def end(self, job: Job[T]) -> None:
        """Forget a completed job."""
        self._by_id.pop(job.job_id, None)
        if self._by_keys.get(id(job.keys)) is job:
            del self._by_keys[id(job.keys)]

    def clear(self) -> None:
        """Forget all: a reset made their completions meaningless."""
        self._by_keys.clear()
        self._by_id.clear()


def loaded_groups(keys: facts.Keys) -> list[GroupChunks]:
    """Per-group counts of a load."""
    counts = facts.count_by_group(keys)
    return [GroupChunks(kv_group=g, loaded=n) for g, n in sorted(counts.items())]
