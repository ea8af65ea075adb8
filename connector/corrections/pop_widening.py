"""Defect: a full-attention drafter group is popped without being widened.

The lookup gives up the last matched chunk of a drafter group. To afford that
it asks sliding-window groups for one more chunk, but not full-attention ones:
there the pop shrinks the boundary below what was asked for, possibly below a
coarser sibling's chunk, and the whole request is served nothing (#52735).

Correction: ask for one more chunk. The caller pops it when this is the group's
first pass, and clips it off otherwise, so asking always is exact.
"""

from __future__ import annotations

from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvlens.connector.corrections import fakes
from kvlens.connector.corrections.switch import Switch
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import GroupKind
from kvlens.telemetry.verdict.search import search

NAME = "pop_widening"
SUMMARY = "full-attention drafter groups are popped without asking for one chunk more"
FIXED_IN = "0.30.0"


def present() -> bool:
    """Whether 64 resident tokens serve fewer than the 48 that two groups can agree on.

    The first group's chunk is 48 tokens; the second, a drafter group with chunks
    of 16, has a fourth chunk to give up.
    """
    scheduler, status = fakes.lookup_case(
        OffloadingConnectorScheduler,
        groups=[(fakes.full_attention(48), 48, False), (fakes.full_attention(16), 16, True)],
        num_tokens=64,
    )
    return bool(fakes.run_lookup(scheduler, status) != 48)


def apply(base: type[Any]) -> type[Any]:
    """Widen prefix queries of drafter groups by one chunk."""

    switch = Switch(NAME)

    class WithWidening(base):
        def _maximal_prefix_lookup(
            self,
            keys: Any,
            req_context: Any,
            req: Any,
            group_config: Any,
            start_chunk_idx: int,
        ) -> int | None:
            def widened() -> Any:
                status = self._req_status[req.request_id]
                index = self._kvlens_group_position[group_config.group_idx]
                every = status.group_states[index].offload_keys
                end = start_chunk_idx + len(keys)
                return every[start_chunk_idx : end + 1] if end < len(every) else keys

            if group_config.is_eagle_group:
                keys = switch(self, widened, keys)
            found: int | None = super()._maximal_prefix_lookup(
                keys, req_context, req, group_config, start_chunk_idx
            )
            return found

        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, vllm_config, kv_cache_config)
            self._kvlens_group_position = {
                group.group_idx: position
                for position, group in enumerate(self.config.kv_group_configs)
            }

    return WithWidening


def cured(cls: type[Any], rng: Random) -> bool:
    """Whether a lookup of a made-up layout, all resident, reaches what a wider query would."""
    chunks = [16 * rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    drafters = [rng.random() < 0.5 for _ in chunks]
    tokens = rng.randint(16, 512)
    scheduler, status = fakes.lookup_case(
        cls,
        [(fakes.full_attention(c), c, d) for c, d in zip(chunks, drafters, strict=True)],
        tokens,
    )
    scheduler._kvlens_group_position = dict(enumerate(range(len(chunks))))
    layout = Layout(
        groups=[
            GroupLayout(
                kv_group=index,
                group_kind=str(GroupKind.FULL_ATTENTION),
                tokens_per_block=chunk,
                tokens_per_chunk=chunk,
            )
            for index, chunk in enumerate(chunks)
        ],
        tokens_per_hash=16,
    )
    popped = [index for index, drafter in enumerate(drafters) if drafter]
    reached = search(layout, lambda *_: True, 0, tokens, drafters=popped, widen=True)
    return fakes.run_lookup(scheduler, status) == reached
