"""Defect: a finished request is offloaded up to a token that has no KV.

``num_tokens`` counts the last sampled token, whose KV was never written. A
request that ends on a block boundary stores a block with one unwritten slot
under a valid hash (#54288), with ``offload_prompt_only=false``.

Correction: a finished request is offloadable up to
``max(prompt tokens, tokens - 1)``; an aborted one keeps vLLM's own limit.
"""

from __future__ import annotations

from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvlens.connector.corrections import fakes
from kvlens.connector.corrections.switch import Switch

NAME = "token_watermark"
SUMMARY = "the block that holds the last sampled token's unwritten slot is stored"
FIXED_IN = "0.30.0"


def present() -> bool:
    """Whether a request finished at 17 + 15 tokens offers its second 16-token chunk."""
    offered = fakes.finished_store_case(OffloadingConnectorScheduler, prompt=17, total=32)
    return bool(offered > 1)


def apply(base: type[Any]) -> type[Any]:
    """Clamp what a finished request may offload."""

    switch = Switch(NAME)

    class WithWatermark(base):
        def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
            def written() -> int:
                request = req_status.req
                if not request.is_finished() or request.status is RequestStatus.FINISHED_ABORTED:
                    return num_computed_tokens
                final = max(request.num_prompt_tokens, request.num_tokens - 1)
                return int(min(num_computed_tokens, final))

            num_computed_tokens = switch(self, written, num_computed_tokens)
            tokens: int = super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
            return tokens

    return WithWatermark


def cured(cls: type[Any], rng: Random) -> bool:
    """Whether a made-up finished request offers no chunk whose last slot was never written."""
    prompt = rng.randint(1, 200)
    total = prompt + rng.randint(1, 100)
    offered = fakes.finished_store_case(cls, prompt=prompt, total=total)
    return offered == max(prompt, total - 1) // 16
