"""Tiered offloading for machines without a GPU: host memory, and below it files.

vLLM's ``TieringOffloadingSpec`` keeps its first tier in memory that the scheduler's
process and all workers share; only its worker needs a GPU. This spec copies between
vLLM's KV buffers and that same memory, so that the tiers below see real bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvlens.connector import engine_facts
from kvlens.connector.host_memory import HostMemoryWorker


class HostTiersWorker(HostMemoryWorker):
    """Copies chunks between KV blocks and this worker's part of the shared memory."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, slots: int, region: Any) -> None:
        self._region = region
        super().__init__(kv_caches, blocks_per_chunk, slots, self._part)

    def _part(self, slots: int, size: int) -> torch.Tensor:
        region = self._region
        # Named create_next_view in 0.27.
        create = getattr(region, "create_next_worker_view", None) or region.create_next_view
        view: torch.Tensor = create(size)
        return view

    def shutdown(self) -> None:
        """Finish running copies, stop, and let go of the shared memory."""
        super().shutdown()
        self._mirrors.clear()  # views keep the mapping open
        self._region.cleanup()


class HostMemoryTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` for machines whose device is the CPU.

    On CUDA and XPU it is the stock spec.
    """

    _host_worker: HostTiersWorker | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """The stock worker where vLLM has one, else the host copier.

        Raises:
            ValueError: for ``canonical_layout``, in which workers write parts of pages.
        """
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            if getattr(self.config, "canonical_layout", False):
                raise ValueError(
                    "HostMemoryTieringSpec copies whole pages: leave canonical_layout out of "
                    "kv_connector_extra_config"
                )
            slots = engine_facts.capacity_chunks(self) or 0
            # By position: chunks were called blocks until 0.29.
            region = SharedOffloadRegion(
                self._engine_id,
                slots,
                0 if self.replicated_layout else self.config.parallel.rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            self._host_worker = HostTiersWorker(kv_caches, self.blocks_per_chunk, slots, region)
        return self._host_worker
