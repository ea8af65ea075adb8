"""An offload tier that gives back other bytes than it got: what a canary must notice."""

from __future__ import annotations

from typing import Any

from kvlens.connector.host_memory import HostMemoryOffloadingSpec, HostMemoryWorker


class ForgetfulWorker(HostMemoryWorker):
    """Loads zeros."""

    def _copy(self, job_id: int, gpu: Any, host: Any, store: bool) -> Any:
        if not store:
            for mirror in self._mirrors:
                mirror.zero_()
        return super()._copy(job_id, gpu, host, store)


class ForgetfulSpec(HostMemoryOffloadingSpec):
    """The host's memory with such a worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        worker = super().get_worker(kv_caches)
        worker.__class__ = ForgetfulWorker
        return worker
