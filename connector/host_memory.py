"""Offloading between host buffers, for machines without a GPU.

vLLM's ``CPUOffloadingSpec`` refuses a CPU platform. This spec keeps its
scheduler side (the same manager, policies and sizes) and gives it a worker
that copies between vLLM's KV buffers and a buffer of its own, in a thread:
real blocks, real bytes, asynchronous as on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvlens.connector import engine_facts


class HostMemoryWorker(OffloadingWorker):
    """Copies chunks between KV blocks and host slots.

    A slot holds one chunk of one group: ``blocks_per_chunk`` pages of each of
    the group's tensors, so each tensor has a mirror of shape
    ``(slots, blocks_per_chunk, page bytes)``.
    """

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        slots: int,
        allocate: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        """``allocate`` gives the memory of one tensor, ``(slots, bytes)``; else it is its own."""
        self._caches = kv_caches
        self._blocks_per_chunk = blocks_per_chunk
        self._mirrors = [
            (allocate or _zeros)(slots, blocks_per_chunk * item.page_size_bytes).view(
                slots, blocks_per_chunk, item.page_size_bytes
            )
            for item in kv_caches.tensors
        ]
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvlens-copy")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start copying blocks ``src_spec`` into slots ``dst_spec``."""
        self._jobs[job_id] = self._pool.submit(self._copy, job_id, src_spec, dst_spec, True)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Start copying slots ``src_spec`` into blocks ``dst_spec``.

        An ``expedited`` load, which a step waits for (0.33), queues like any other:
        a copy in host memory is short.
        """
        self._jobs[job_id] = self._pool.submit(self._copy, job_id, dst_spec, src_spec, False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Results of the jobs that ended since the last call."""
        ended = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Block until the given jobs have ended; they stay to be collected."""
        for job_id in job_ids:
            if (future := self._jobs.get(job_id)) is not None:
                future.result()

    def shutdown(self) -> None:
        """Finish running copies and stop."""
        self._pool.shutdown(wait=True)

    def _copy(self, job_id: int, gpu: Any, host: Any, store: bool) -> TransferResult:
        start = time.perf_counter()
        size = 0
        for group, blocks, slots, pages in self._groups(gpu, host):
            for ref in self._caches.group_data_refs[group]:
                cache = self._caches.tensors[ref.tensor_idx].tensor
                mirror = self._mirrors[ref.tensor_idx]
                width = ref.page_size_bytes
                if store:
                    mirror[slots, pages, :width] = cache[blocks, :width]
                else:
                    cache[blocks, :width] = mirror[slots, pages, :width]
                size += width * len(blocks)
        return TransferResult(job_id, True, size, time.perf_counter() - start)

    def _groups(self, gpu: Any, host: Any) -> Any:
        """Yield (group, block ids, slot ids, page in slot), one entry per block each."""
        host_at = 0
        for group, first, block_ids in self._blocks(gpu):
            count = len(block_ids)
            if not count:
                continue
            # The first block may lie inside a chunk: skip the pages before it.
            pages = first % self._blocks_per_chunk + np.arange(count)
            slot_count = int(pages[-1]) // self._blocks_per_chunk + 1
            slot_ids = host.block_ids[host_at : host_at + slot_count]
            yield (
                group,
                torch.from_numpy(block_ids.astype(np.int64)),
                torch.from_numpy(slot_ids[pages // self._blocks_per_chunk].astype(np.int64)),
                torch.from_numpy(pages % self._blocks_per_chunk),
            )
            host_at += slot_count

    def _blocks(self, gpu: Any) -> Iterator[tuple[int, int, np.ndarray]]:
        """(group, index of its first block in the prompt, block ids); vLLM 0.34 gives addresses."""
        addresses = getattr(gpu, "ptrs", None)
        counts = gpu.group_sizes if addresses is None else gpu.group_block_counts
        at = 0
        for group, (count, first) in enumerate(zip(counts, gpu.block_indices, strict=True)):
            if addresses is None:
                yield group, first, gpu.block_ids[at : at + count]
                at += count
                continue
            refs = self._caches.group_data_refs[group]
            tensor = self._caches.tensors[refs[0].tensor_idx].tensor
            here = addresses[at : at + count] - np.uint64(tensor.data_ptr())
            yield group, first, here // np.uint64(tensor.stride(0) * tensor.element_size())
            at += count * len(refs)  # all blocks of one tensor, then all of the next


def _zeros(slots: int, size: int) -> torch.Tensor:
    return torch.zeros((slots, size), dtype=torch.int8)


class HostMemoryOffloadingSpec(CPUOffloadingSpec):
    """``CPUOffloadingSpec`` for machines whose device is the CPU.

    On CUDA and XPU it is the stock spec, so one configuration serves both.
    """

    _host_worker: HostMemoryWorker | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """The stock worker where vLLM has one, else the host copier."""
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            slots = engine_facts.capacity_chunks(self) or 0
            self._host_worker = HostMemoryWorker(kv_caches, self.blocks_per_chunk, slots)
        return self._host_worker
