"""Defect: the last complete chunk of a drafter group is never stored.

While decoding, the trailing chunk of a drafter group is rightly held back: a
rejected draft may still rewrite it. Once the request has finished nothing can,
but the chunk was never released: a permanent hole in the prefix (#52735).

Correction: the exclusion ends with the request.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
)

from kvlens.connector.corrections import fakes
from kvlens.connector.corrections.switch import Switch

NAME = "held_back_tail"
SUMMARY = "a finished request's last chunk of a drafter group is never stored"
FIXED_IN = "0.30.0"


class _Released(RequestOffloadState):
    """State of a request whose held-back tail is released when it finishes."""

    __slots__ = ()

    def storable_chunks(self, group_config: Any, *args: Any) -> int:
        if group_config.is_eagle_group and self.req.is_finished():
            group_config = group_config._replace(is_eagle_group=False)
        # Named, not super(): a slotted dataclass is rebuilt, which breaks zero-argument super.
        chunks: int = RequestOffloadState.storable_chunks(self, group_config, *args)
        return chunks


def present() -> bool:
    """Whether a finished request of 17 + 15 tokens has but one storable 16-token chunk."""
    state = SimpleNamespace(
        req=SimpleNamespace(num_prompt_tokens=17, is_finished=lambda: True),
        config=SimpleNamespace(blocks_per_chunk=1),
    )
    group = SimpleNamespace(tokens_per_chunk=16, is_eagle_group=True)
    group_state = SimpleNamespace(block_ids=[1, 2], offload_keys=[b"a", b"b"])
    return fakes.storable_chunks(state, group, group_state, 32) < 2


def apply(base: type[Any]) -> type[Any]:
    """Give every request a state that releases its tail."""

    switch = Switch(NAME)

    class WithReleasedTail(base):
        def on_new_request(self, request: Any) -> None:
            super().on_new_request(request)
            switch(self, lambda: self._kvlens_release(request), None)

        def _kvlens_release(self, request: Any) -> None:
            self._req_status[request.request_id].__class__ = _Released

    return WithReleasedTail


class _Group(NamedTuple):
    tokens_per_chunk: int
    is_eagle_group: bool


def cured(_cls: type[Any], rng: Random) -> bool:
    """Whether a made-up request, running or finished, stores what is final and nothing else."""
    chunk, drafter, finished = 16 * rng.randint(1, 4), rng.random() < 0.7, rng.random() < 0.7
    prompt = rng.randint(1, 256)
    tokens = prompt + rng.randint(0, 128)
    there = tokens // chunk
    state: Any = SimpleNamespace(
        req=SimpleNamespace(num_prompt_tokens=prompt, is_finished=lambda: finished),
        config=SimpleNamespace(blocks_per_chunk=1),
    )
    group_state = SimpleNamespace(block_ids=list(range(there)), offload_keys=[b""] * there)
    final = there - int(drafter and not finished and tokens > prompt)
    stored = _Released.storable_chunks(state, _Group(chunk, drafter), group_state, tokens)
    return bool(stored == max(0, final))
