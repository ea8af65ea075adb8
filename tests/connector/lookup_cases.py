"""Random lookups: a layout, what is stored of it and a request, as vLLM could present them."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from math import lcm
from random import Random
from typing import Any

import torch
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import LookupResult

from kvlens.connector import compat, engine_facts, support
from kvlens.telemetry.records import GroupLayout, Layout

STATES = ["align"] if Version(support.vllm_version()) >= Version("0.32") else ["align", "all"]
"""Recurrent cache modes that this vLLM has."""
KINDS = ["full_attention", "full_attention", "sliding_window", "mamba", "mamba"] + (
    ["chunked_local"] if compat.offloads_chunked_local() else []
)
RETAINS_EXTRA = "extra_retained_tokens" in signature(SlidingWindowSpec).parameters
"""Whether windows can be kept longer than attention reads them."""
CAPS_NEW_TOKENS = (
    "max_num_new_tokens"
    in signature(OffloadingConnectorScheduler.get_num_new_matched_tokens).parameters
)
"""Whether a lookup can be limited by ``max_num_new_tokens``."""
DRAFTER_TAILS = hasattr(OffloadingConnectorScheduler, "_partial_tail_key_tokens")
"""Whether partial last blocks are stored beside drafter groups too."""
UNIT = 4
"""Tokens per hash."""
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


@dataclass(frozen=True)
class Group:
    """One KV-cache group; sizes in tokens."""

    kind: str
    block: int
    window: int | None = None
    extra: int = 0
    span: int | None = None
    mode: str = "align"
    drafter: bool = False

    def spec(self) -> Any:
        size = {"block_size": self.block}
        attention = {**size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        if self.kind == "mamba":
            shape = {"shapes": ((1, 8),), "dtypes": (torch.float32,)}
            return MambaSpec(**size, **shape, mamba_cache_mode=self.mode)
        if self.kind == "sliding_window":
            extra = {"extra_retained_tokens": self.extra} if self.extra else {}
            return SlidingWindowSpec(**attention, sliding_window=self.window, **extra)
        if self.kind == "chunked_local":
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=self.span)
        return FullAttentionSpec(**attention)


@dataclass(frozen=True)
class Case:
    """One lookup: a layout, what is stored, and a request."""

    groups: tuple[Group, ...]
    blocks_per_chunk: int
    tokens: int
    local: int
    stored: dict[tuple[int, int], Any]
    """``(group, chunk)`` to lookup result; what is not in it is missing."""
    block_drop: bool = False
    load_cap: int | None = None
    new_cap: int | None = None
    prefix_caching: bool = True
    being_loaded: frozenset[tuple[int, int]] = frozenset()
    tails: dict[tuple[int, int], Any] = field(default_factory=dict)
    """``(group, tokens)`` to lookup result of a partial last block keyed at ``tokens``."""
    fine_hits: bool = False
    """Whether vLLM's own prefix cache hits inside blocks, which moves drafters' tail keys."""
    lookahead: int = 0
    """Tokens after a block that its hash covers as well."""

    @property
    def keyed(self) -> int:
        """Tokens that blocks can have a hash for."""
        return max(0, self.tokens - self.lookahead)

    @property
    def partial_tail(self) -> bool:
        """Whether vLLM stores partial last blocks in this layout."""
        blocks = {group.block for group in self.groups}
        states = [group for group in self.groups if group.kind == "mamba"]
        return (
            compat.loads_partial_tail()
            and self.blocks_per_chunk == len(blocks) == 1
            and bool(states)
            and min(blocks) > UNIT
            and all(g.kind in ("full_attention", "mamba") for g in self.groups)
            and all(group.mode == "align" for group in states)
            and (DRAFTER_TAILS or not any(group.drafter for group in self.groups))
        )

    def tail_key(self, group: int, boundary: int) -> int:
        """Tokens at which a group's tail up to ``boundary`` is keyed."""
        if self.lookahead or not self.groups[group].drafter:
            return boundary
        return boundary + (UNIT if self.fine_hits else self.groups[group].block)

    def tail(self, group: int, boundary: int) -> Any:
        """Lookup result of a group's tail; a key at a chunk's end is that chunk's."""
        tokens = self.tail_key(group, boundary)
        chunk, rest = divmod(tokens, self.groups[group].block)
        if rest == 0:
            return self.stored.get((group, chunk - 1), MISS)
        return self.tails.get((group, tokens), MISS)

    @property
    def layout(self) -> Layout:
        return Layout(
            groups=[
                GroupLayout(
                    kv_group=index,
                    group_kind=group.kind,
                    tokens_per_block=group.block,
                    tokens_per_chunk=group.block * self.blocks_per_chunk,
                    window=group.window,
                    extra_retained=group.extra,
                    attention_chunk=group.span,
                    drafter=group.drafter,
                    drafter_used=group.drafter and not self.lookahead,
                    hash_lookahead=self.lookahead,
                )
                for index, group in enumerate(self.groups)
            ],
            tokens_per_hash=UNIT,
            blocks_per_chunk=self.blocks_per_chunk,
            partial_tail=self.partial_tail,
        )

    @property
    def cap(self) -> int | None:
        return min((c for c in (self.load_cap, self.new_cap) if c is not None), default=None)

    @property
    def settled(self) -> bool:
        """Whether no answer can be a deferral."""
        results = {*self.stored.values(), *self.tails.values()}
        return not self.being_loaded and results <= {HIT, MISS}


def make_case(random: Random) -> Case:
    """A random case; every size is drawn so that small ones are common."""
    if random.random() < 0.2:
        blocks_per_chunk, groups = 1, _make_tail_groups(random)
    else:
        blocks_per_chunk = random.choice([1, 1, 1, 2, 3])
        state_block = UNIT * random.choice([1, 2, 4, 4, 6, 8])
        mode = random.choice(STATES)
        groups = tuple(
            _make_group(random, blocks_per_chunk, state_block, mode)
            for _ in range(random.choice([1, 2, 2, 3, 3, 4]))
        )
    tokens = random.randint(1, random.choice([60, 150, 300]))
    prefix_caching = random.random() < 0.9
    step = lcm(*(group.block for group in groups))
    local = 0
    if prefix_caching and random.random() < 0.4:
        local = step * random.randint(0, (tokens - 1) // step)
    unsettled = random.random() < 0.25
    drafts = any(group.drafter for group in groups)
    lookahead = 0
    if engine_facts.hashes_look_ahead() and random.random() < (0.5 if drafts else 0.1):
        lookahead = random.choice([1, 1, 1, 2, 5])
    keyed = max(0, tokens - lookahead)
    stored = _make_stored(random, groups, blocks_per_chunk, keyed, unsettled)
    being_loaded: frozenset[tuple[int, int]] = frozenset()
    if prefix_caching and stored and random.random() < 0.1:
        being_loaded = frozenset(random.sample(sorted(stored), min(2, len(stored))))
    load_cap = new_cap = None
    if compat.caps_loads() and random.random() < 0.1:
        load_cap = random.randint(0, tokens)
    if CAPS_NEW_TOKENS and random.random() < 0.1:
        new_cap = random.randint(1, tokens)
    case = Case(
        groups=groups,
        blocks_per_chunk=blocks_per_chunk,
        tokens=tokens,
        local=local,
        stored=stored,
        block_drop=bool(drafts or lookahead) or random.random() < 0.2,
        load_cap=load_cap,
        new_cap=new_cap,
        prefix_caching=prefix_caching,
        being_loaded=being_loaded,
        fine_hits=random.random() < 0.5,
        lookahead=lookahead,
    )
    if case.partial_tail:
        case.tails.update(_make_tails(random, case, unsettled))
    return case


def _make_tail_groups(random: Random) -> tuple[Group, ...]:
    """Groups of a layout whose partial last blocks are stored."""
    block = UNIT * random.choice([2, 3, 4, 8])
    full = [
        Group("full_attention", block, drafter=DRAFTER_TAILS and random.random() < 0.3)
        for _ in range(random.choice([0, 1, 1, 2]))
    ]
    groups = full + [Group("mamba", block)] * random.choice([1, 1, 2])
    random.shuffle(groups)
    return tuple(groups)


def _make_tails(random: Random, case: Case, unsettled: bool) -> dict[tuple[int, int], Any]:
    tails = {}
    for _ in range(random.choice([0, 1, 1, 2, 4])):
        boundary = UNIT * random.randint(0, case.keyed // UNIT)
        if boundary % case.groups[0].block == 0:
            continue  # a complete boundary is stored as such
        for group in range(len(case.groups)):
            tokens = case.tail_key(group, boundary)
            if tokens % case.groups[group].block and tokens <= case.keyed:
                awaited = unsettled and random.random() < 0.1
                if random.random() < 0.93:
                    tails[group, tokens] = random.choice([PENDING, RETRY]) if awaited else HIT
    return tails


def _make_group(random: Random, blocks_per_chunk: int, state_block: int, mode: str) -> Group:
    kind = random.choice(KINDS)
    if kind == "mamba":  # vLLM wants all of them to have one size
        return Group(kind, state_block, mode=mode)
    block = UNIT * random.choice([1, 1, 2, 3, 4, 4, 8])
    chunk = block * blocks_per_chunk
    window, extra, span = None, 0, None
    if kind == "sliding_window":
        window = random.choice([chunk, chunk + 1, random.randint(2, 5 * chunk)])
        extra = random.choice([0, 0, 0, 1, random.randint(1, 2 * chunk)])
        extra = extra if RETAINS_EXTRA else 0
    elif kind == "chunked_local":  # its kernels want whole blocks
        span = block * random.choice([1, 2, 3, 4, 2 * blocks_per_chunk])
    drafter = kind != "chunked_local" and random.random() < 0.3
    return Group(kind, block, window, extra, span, mode, drafter)


def _make_stored(
    random: Random, groups: tuple[Group, ...], blocks_per_chunk: int, tokens: int, unsettled: bool
) -> dict[tuple[int, int], Any]:
    stored = {}
    for index, group in enumerate(groups):
        share = random.choice([1.0, 1.0, 1.0, 1.0, 0.97, 0.9, 0.6])
        chunks = tokens // (group.block * blocks_per_chunk)
        prefix = random.randint(0, chunks) if random.random() < 0.2 else chunks
        for chunk in range(chunks):
            if chunk < prefix and random.random() < share:
                awaited = unsettled and random.random() < 0.1
                stored[index, chunk] = random.choice([PENDING, RETRY]) if awaited else HIT
    return stored
