"""Defect: of windowed groups only a window is stored at which no load can end.

With ``prefix_cache_retention_interval`` (0 by default since 0.30) the store keeps, of a
windowed group, the window that ends at the prompt's last chunk of full attention. Where
another group lets no load end there, nothing can ever be served: beside a recurrent group
with larger chunks, whose states are at multiples of those, or beside a drafter group, whose
last chunk is popped. The GPU's own prefix cache knows of both.

The same goes for the window at a junction, which is where another prompt was found to part:
from 0.34 on vLLM keeps one as far as full attention was found in the tier, so that the same
prompt is served the third time, but not one whose states lie elsewhere, nor one that has
grown.

Correction: the window that ends at the largest boundary at which all groups can meet is
stored as well. That is at most one more window for each windowed group of a prompt and of a
junction, and none where vLLM's own window is that one.
"""

from __future__ import annotations

from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvlens.connector import engine_facts
from kvlens.connector.corrections import fakes
from kvlens.connector.corrections.switch import Switch
from kvlens.connector.layout import describe_group
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import GroupKind
from kvlens.telemetry.verdict.oracle import required_chunks, whole_boundary

NAME = "reachable_window"
SUMMARY = "of windowed groups only a window is stored at which no load can end"
FIXED_IN = None
"""No release so far."""
_METHOD = "_reachable_store_block_mask"


def present() -> bool:
    """Whether a prompt of 300 tokens keeps no window that ends at 256, where its last state is."""
    if not hasattr(OffloadingConnectorScheduler, _METHOD):
        return False
    scheduler, window = fakes.window_case(OffloadingConnectorScheduler)
    mask = getattr(scheduler, _METHOD)(
        group_config=window,
        start_chunk_idx=0,
        end_chunk_idx=18,
        final_segment_end_chunk_idx=None,
        reachable_boundaries=(299,),
    )
    return mask is not None and not all(mask[12:16])


def apply(base: type[Any]) -> type[Any]:
    """Store the window that a load will need as well."""

    switch = Switch(NAME)

    class WithReachableWindows(base):
        def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(spec, vllm_config, kv_cache_config)
            lookahead = engine_facts.hash_lookahead(vllm_config)
            self._kvlens_groups = [
                describe_group(group, group.kv_cache_spec, bool(group.is_eagle_group), lookahead)
                for group in self.config.kv_group_configs
            ]

        def _reachable_store_block_mask(self, *args: Any, **case: Any) -> list[bool] | None:
            mask: list[bool] | None = super()._reachable_store_block_mask(*args, **case)
            return switch(self, lambda: self._kvlens_mask(mask, case), mask)

        def _kvlens_mask(self, mask: list[bool] | None, case: dict[str, Any]) -> list[bool] | None:
            boundaries = case["reachable_boundaries"]
            if mask is None or not boundaries:
                return mask
            return _widened(mask, self._kvlens_groups, case, self.config.blocks_per_chunk)

    return WithReachableWindows


def _met(groups: list[GroupLayout], junction: int) -> int:
    """Largest boundary up to ``junction`` at which all groups can meet.

    A junction is as far as full attention has been found, so that only the others may lower it.
    """
    others = [group for group in groups if not group.full_attention]
    layout = Layout(groups=others, tokens_per_hash=1)
    return min(junction, whole_boundary(layout, junction + max(1, layout.hash_lookahead)))


def _widened(
    mask: list[bool], groups: list[GroupLayout], case: dict[str, Any], blocks_per_chunk: int
) -> list[bool]:
    """``mask``, one entry per block, with the blocks that loads up to each boundary need."""
    layout = Layout(groups=groups, tokens_per_hash=1)
    group = layout.by_group()[case["group_config"].group_idx]
    start, end = case["start_chunk_idx"], case["end_chunk_idx"]
    last, *junctions = case["reachable_boundaries"]
    boundaries = {whole_boundary(layout, last + 1)}
    boundaries.update(_met(groups, junction) for junction in junctions)
    wanted: set[int] = set()
    for boundary in boundaries:
        wanted.update(required_chunks(group, 0, boundary) or ())
        if group.pop:
            wanted.add(-(-boundary // group.tokens_per_chunk))  # the one to pop
    for chunk in wanted:
        if start <= chunk < end:
            at = (chunk - start) * blocks_per_chunk
            mask[at : at + blocks_per_chunk] = [True] * blocks_per_chunk
    return mask


def cured(cls: type[Any], rng: Random) -> bool:
    """Whether a made-up prompt keeps the window at the largest boundary where a load can end."""
    scheduler, window = fakes.window_case(cls)
    last = rng.randint(64, 1_000)
    end = last // 16
    scheduler._kvlens_groups = groups = [
        describe_group(group, group.kv_cache_spec, bool(group.is_eagle_group), 0)
        for group in scheduler.config.kv_group_configs
    ]
    states = 16 * rng.randint(1, 16)
    groups.append(
        GroupLayout(
            kv_group=2,
            group_kind=str(GroupKind.MAMBA),
            tokens_per_block=states,
            tokens_per_chunk=states,
        )
    )
    mask = getattr(scheduler, _METHOD)(
        group_config=window,
        start_chunk_idx=0,
        end_chunk_idx=end,
        final_segment_end_chunk_idx=None,
        reachable_boundaries=(last,),
    )
    boundary = whole_boundary(Layout(groups=groups, tokens_per_hash=1), last + 1)
    wanted = required_chunks(groups[1], 0, boundary) or ()
    return mask is None or all(mask[chunk] for chunk in wanted if chunk < end)
