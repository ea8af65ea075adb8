"""Defect: a finished request is offloaded up to a token that has no KV.

``num_tokens`` counts the last sampled token, whose KV was never written. A
request that ends on a block boundary stores a block with one unwritten slot
under a valid hash (#54288), with ``offload_prompt_only=false``.

Correction: a finished request is offloadable up to
``max(prompt tokens, tokens - 1)``; an aborted one keeps vLLM's own limit.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvlens.connector.corrections import fakes

NAME = "token_watermark"
SUMMARY = "the block that holds the last sampled token's unwritten slot is stored"
FIXED_IN = "0.30.0"


def present() -> bool:
    """Whether a request finished at 17 + 15 tokens offers its second 16-token chunk."""
    offered = fakes.finished_store_case(OffloadingConnectorScheduler, prompt=17, total=32)
    return bool(offered > 1)


def apply(base: type[Any]) -> type[Any]:
    """Clamp what a finished request may offload."""

    class WithWatermark(base):
        def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
            request = req_status.req
            if request.is_finished() and request.status is not RequestStatus.FINISHED_ABORTED:
                written = max(request.num_prompt_tokens, request.num_tokens - 1)
                num_computed_tokens = min(num_computed_tokens, written)
            tokens: int = super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
            return tokens

    return WithWatermark
