"""The tier that a simulation stores into: vLLM's own manager, transfers in engine steps.

The scheduler side is vLLM's ``CPUOffloadingSpec`` with its manager and eviction
policy. The worker side moves no bytes: a transfer ends some engine steps after
it was submitted, or never, if the tier hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvlens.connector.simulation.scenario import BackendState, TransferSteps

CAPACITY = "simulated_slots"
"""Key in ``kv_connector_extra_config``: chunks that the tier holds."""
Restriction = Callable[[Iterable[bytes]], list[bytes]]
"""Offload keys in, those that may be offered out."""


class SimulationError(RuntimeError):
    """A scenario that vLLM refuses or that does not end; the message says what to change."""


class SimulatedOffloadingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` whose capacity is given in chunks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Called num_blocks in some releases, num_chunks in others.
        for name in {"num_blocks", "num_chunks"} & vars(self).keys():
            setattr(self, name, int(self.extra_config[CAPACITY]))


class Transfers(OffloadingWorker):
    """Transfers that take engine steps. Sizes are counted in blocks of ``block_bytes``."""

    def __init__(self, takes: TransferSteps, block_bytes: int, step_seconds: float) -> None:
        self.state = BackendState()
        self._takes = takes
        self._block_bytes = block_bytes
        self._step_seconds = step_seconds
        self._step = 0
        self._jobs: dict[int, tuple[int, bool, int]] = {}
        """Job id -> (step in which it ends, whether it is a store, bytes)."""

    def advance(self) -> None:
        """One engine step has passed."""
        self._step += 1

    @property
    def only_hung(self) -> bool:
        """Whether everything that is in flight hangs."""
        return all(self._hangs(store) for _, store, _ in self._jobs.values())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a store."""
        return self._submit(job_id, True, _blocks(src_spec), self._takes.store)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a load."""
        return self._submit(job_id, False, _blocks(dst_spec), self._takes.load)

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        ended = [
            job_id
            for job_id, (end, store, _) in self._jobs.items()
            if end <= self._step and not self._hangs(store)
        ]
        results = []
        for job_id in ended:
            _, store, size = self._jobs.pop(job_id)
            steps = self._takes.store if store else self._takes.load
            success = self._behaviour(store) != "fail"
            results.append(TransferResult(job_id, success, size, steps * self._step_seconds))
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """End the given transfers now, as an engine does before it reuses their blocks."""
        for job_id in self._jobs.keys() & set(job_ids):
            _, store, size = self._jobs[job_id]
            if self._hangs(store):
                raise SimulationError(
                    "the engine would wait for ever here: it wants to reuse blocks whose transfer "
                    "hangs; raise gpu_blocks, or let the tier complete (backend) before"
                )
            self._jobs[job_id] = (self._step, store, size)

    def shutdown(self) -> None:
        """Forget everything."""
        self._jobs.clear()

    def _submit(self, job_id: int, store: bool, blocks: int, takes: int) -> bool:
        # A transfer that takes one step is reported in the step after its own.
        self._jobs[job_id] = (self._step + takes, store, blocks * self._block_bytes)
        return True

    def _hangs(self, store: bool) -> bool:
        return self._behaviour(store) == "hang"

    def _behaviour(self, store: bool) -> str:
        return self.state.stores if store else self.state.loads


def _blocks(device_spec: Any) -> int:
    """Blocks that a transfer moves: named by number, or by address from 0.34 on."""
    counts: tuple[int, ...] | None = getattr(device_spec, "group_block_counts", None)
    return len(device_spec.block_ids) if counts is None else sum(counts)


class Tier:
    """Stands before the manager: what never reaches the tier, and answers that are put off.

    Wraps outside of the observer's hooks, so that the observer sees what an
    engine that does not offer these chunks would show.
    """

    def __init__(self, manager: Any, transfers: Transfers) -> None:
        self._transfers = transfers
        self._restricted: dict[str, Restriction] = {}
        self._prepare_store, self._lookup = manager.prepare_store, manager.lookup
        manager.prepare_store, manager.lookup = self._offer, self._answer

    def restrict(self, request_id: str, restriction: Restriction) -> None:
        """Let this request offer only what ``restriction`` leaves of its keys."""
        self._restricted[request_id] = restriction

    def _offer(self, keys: Any, req_context: Any, *args: Any, **kwargs: Any) -> Any:
        restriction = self._restricted.get(req_context.req_id)
        if restriction is not None:
            keys = restriction(keys)
        return self._prepare_store(keys, req_context, *args, **kwargs)

    def _answer(self, key: Any, req_context: Any) -> Any:
        found = self._lookup(key, req_context)
        if self._transfers.state.lookups == "retry" and found is LookupResult.HIT:
            return LookupResult.RETRY
        return found
