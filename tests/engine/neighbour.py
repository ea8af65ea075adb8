"""Another connector for ``MultiConnector``: it stores and serves real KV, and tells nothing.

vLLM's own offload connector under another name. It declares no metrics, since
vLLM's and kvlens' would have the same names.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class NeighbourConnector(OffloadingConnector):
    def get_kv_connector_stats(self) -> None:
        return None

    @classmethod
    def build_prom_metrics(cls, *_args: Any, **_kwargs: Any) -> None:
        return None
