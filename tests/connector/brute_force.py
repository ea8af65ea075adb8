"""Lookups on random layouts, held against the definition tried on every boundary.

``make_case`` draws a layout, what is stored of it and a request, within what vLLM
could present. ``expected`` tries every boundary with ``telemetry.oracle.is_servable``.
``run`` does the lookup on vLLM's own scheduler class and, if something is served,
lets vLLM's own block managers allocate for it and the connector prepare the load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from math import lcm
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config as offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    RequestOffloadingContext,
)

from kvlens.connector import compat
from kvlens.connector.boundary import UnconfirmedError
from kvlens.connector.config import load
from kvlens.connector.corrections import plan
from kvlens.connector.scheduler import scheduler_class
from kvlens.telemetry.oracle import is_recurrent, is_servable, limit, required_chunks
from kvlens.telemetry.records import GroupLayout, Layout

STATES = ["align"] if Version(compat.vllm_version()) >= Version("0.32") else ["align", "all"]
"""Recurrent cache modes that this vLLM has."""
KINDS = ["full_attention", "full_attention", "sliding_window", "mamba", "mamba"] + (
    ["chunked_local"] if compat.offloads_chunked_local() else []
)
CAPS_NEW_TOKENS = (
    "max_num_new_tokens"
    in signature(OffloadingConnectorScheduler.get_num_new_matched_tokens).parameters
)
"""Whether a lookup can be limited by ``max_num_new_tokens``."""
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
                    drafter_used=group.drafter,
                )
                for index, group in enumerate(self.groups)
            ],
            tokens_per_hash=UNIT,
            blocks_per_chunk=self.blocks_per_chunk,
        )

    @property
    def cap(self) -> int | None:
        return min((c for c in (self.load_cap, self.new_cap) if c is not None), default=None)

    @property
    def settled(self) -> bool:
        """Whether no answer can be a deferral."""
        return not self.being_loaded and all(r in (HIT, MISS) for r in self.stored.values())


def make_case(random: Random) -> Case:
    """A random case; every size is drawn so that small ones are common."""
    blocks_per_chunk = random.choice([1, 1, 1, 2, 3])
    state_block = UNIT * random.choice([1, 2, 4, 4, 6, 8])
    mode = random.choice(STATES)
    groups = tuple(
        _make_group(random, blocks_per_chunk, state_block, mode)
        for _ in range(random.choice([1, 2, 2, 3, 3, 4]))
    )
    tokens = random.randint(1, random.choice([40, 100, 260]))
    prefix_caching = random.random() < 0.9
    step = lcm(*(group.block for group in groups))
    local = 0
    if prefix_caching and random.random() < 0.4:
        local = step * random.randint(0, (tokens - 1) // step)
    stored = _make_stored(random, groups, blocks_per_chunk, tokens)
    being_loaded: frozenset[tuple[int, int]] = frozenset()
    if prefix_caching and stored and random.random() < 0.1:
        being_loaded = frozenset(random.sample(sorted(stored), min(2, len(stored))))
    load_cap = new_cap = None
    if compat.caps_loads() and random.random() < 0.1:
        load_cap = random.randint(0, tokens)
    if CAPS_NEW_TOKENS and random.random() < 0.1:
        new_cap = random.randint(1, tokens)
    drafts = any(group.drafter for group in groups)
    return Case(
        groups=groups,
        blocks_per_chunk=blocks_per_chunk,
        tokens=tokens,
        local=local,
        stored=stored,
        block_drop=drafts or random.random() < 0.2,
        load_cap=load_cap,
        new_cap=new_cap,
        prefix_caching=prefix_caching,
        being_loaded=being_loaded,
    )


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
    elif kind == "chunked_local":  # its kernels want whole blocks
        span = block * random.choice([1, 2, 3, 4, 2 * blocks_per_chunk])
    drafter = kind != "chunked_local" and random.random() < 0.3
    return Group(kind, block, window, extra, span, mode, drafter)


def _make_stored(
    random: Random, groups: tuple[Group, ...], blocks_per_chunk: int, tokens: int
) -> dict[tuple[int, int], Any]:
    unsettled = random.random() < 0.25
    stored = {}
    for index, group in enumerate(groups):
        share = random.choice([1.0, 1.0, 1.0, 0.95, 0.8, 0.5, 0.0])
        chunks = tokens // (group.block * blocks_per_chunk)
        prefix = random.randint(0, chunks) if random.random() < 0.3 else chunks
        for chunk in range(chunks):
            if chunk < prefix and random.random() < share:
                awaited = unsettled and random.random() < 0.1
                stored[index, chunk] = random.choice([PENDING, RETRY]) if awaited else HIT
    return stored


def overloads(case: Case, boundary: int) -> bool:
    """Whether an assertion of vLLM forbids to load what this boundary needs.

    It limits the blocks that a windowed group loads; older releases leave
    ``extra_retained_tokens`` out of that limit, which their allocation does not.
    """
    for group in case.groups:
        if group.window is not None:
            chunk = group.block * case.blocks_per_chunk
            most = _window_chunks(group, chunk) * case.blocks_per_chunk + 1
            first = max(case.local, boundary - group.window + 1 - group.extra)
            if -(-boundary // group.block) - first // group.block > most:
                return True
    return False


@cache
def _window_chunks(group: Group, chunk: int) -> int:
    name = "get_sliding_window_size_in_chunks"
    vllms = getattr(offloading, name, None) or getattr(offloading_config, name)
    chunks: int = vllms(group.spec(), chunk)
    return chunks


def servable(case: Case, results: frozenset[Any]) -> int:
    """Largest boundary by definition if chunks with one of ``results`` are hits."""
    shape = case.layout
    holds = lambda group, chunk: case.stored.get((group, chunk)) in results  # noqa: E731
    top = limit(shape, case.local, case.tokens, case.cap)
    for boundary in range(top, case.local, -1):
        if is_servable(shape, holds, case.local, case.tokens, boundary, case.cap) and not overloads(
            case, boundary
        ):
            return boundary
    return case.local


def expected(case: Case) -> int | None:
    """What an exact lookup answers: tokens beyond the local ones, None to wait."""
    best = servable(case, frozenset({HIT, PENDING, RETRY}))
    if best == case.local:
        return 0
    if best != servable(case, frozenset({HIT})):
        return None
    for group in case.layout.groups:
        for chunk in required_chunks(group, case.local, best) or ():
            if (group.kv_group, chunk) in case.being_loaded:
                return None
    return best - case.local


def is_unsafe(case: Case, boundary: int) -> bool:
    """Whether a recurrent group has no state at this boundary, or no token is left to compute."""
    shape = case.layout
    return boundary > limit(shape, 0, case.tokens) or any(
        is_recurrent(group) and boundary % group.tokens_per_chunk for group in shape.groups
    )


class ScriptedManager(OffloadingManager):
    """Answers from a case, counts what it is asked, and loads only what is there."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Any] = {}
        self.asked: dict[bytes, int] = {}
        self.loaded: list[bytes] = []

    def lookup(self, key: bytes, req_context: Any) -> Any:
        self.asked[key] = self.asked.get(key, 0) + 1
        return self.answers.get(key, MISS)

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        assert all(self.answers.get(key) is HIT for key in keys), "a chunk to load is not there"
        self.loaded += keys
        return SimpleNamespace()

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        return None

    def touch(self, *args: Any) -> None:
        pass

    def complete_load(self, *args: Any) -> None:
        pass

    def complete_store(self, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass
class _Request:
    request_id: str
    num_tokens: int
    kv_transfer_params: dict[str, int] | None
    block_hashes: list[bytes] = field(default_factory=list)
    kv_hints: Any = None
    trace_headers: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


class _Pool:
    """A block pool that never runs out."""

    def __init__(self) -> None:
        self.null_block = KVCacheBlock(0)
        self.null_block.is_null = True
        self._last = 0

    def get_new_blocks(self, count: int) -> list[Any]:
        self._last += count
        return [KVCacheBlock(i) for i in range(self._last - count + 1, self._last + 1)]

    def touch(self, blocks: Any) -> None:
        pass


@cache
def _class(mode: str) -> tuple[Any, Any]:
    settings = load({"kvlens": {"lookup": mode}}, {})
    return scheduler_class(plan(settings), settings), settings


@dataclass
class Run:
    """One lookup on vLLM's scheduler class."""

    scheduler: Any
    request: _Request
    case: Case
    answer: int | None = None

    @property
    def manager(self) -> ScriptedManager:
        return self.scheduler.scripted  # type: ignore[no-any-return]

    @property
    def boundary(self) -> int:
        return self.case.local + (self.answer or 0)


def run(case: Case, mode: str) -> Run:
    """Look up ``case`` with ``lookup: mode``."""
    manager = ScriptedManager()
    spec = SimpleNamespace(
        tokens_per_block=tuple(group.block for group in case.groups),
        tokens_per_hash=UNIT,
        blocks_per_chunk=case.blocks_per_chunk,
        offload_prompt_only=True,
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(group_id=i, tokens_per_block=group.block)
                for i, group in enumerate(case.groups)
            ]
        ),
        kv_events_config=SimpleNamespace(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
        get_manager=lambda: manager,
    )
    drop = case.block_drop
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            use_eagle=lambda: drop, use_eagle_block_drop=lambda: drop
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=case.prefix_caching, prefix_cache_retention_interval=None
        ),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )
    cache_groups = []
    for index, group in enumerate(case.groups):
        cache_group = KVCacheGroupSpec([f"layer{index}"], group.spec())
        cache_group.is_eagle_group = group.drafter
        cache_groups.append(cache_group)
    scheduler = _class(mode)[0](spec, vllm_config, SimpleNamespace(kv_cache_groups=cache_groups))
    scheduler.scripted = manager
    params = None if case.load_cap is None else {"max_load_tokens": case.load_cap}
    hashes = [b"%031d." % index for index in range(case.tokens // UNIT)]
    request = _Request("request", case.tokens, params, hashes)
    scheduler.on_new_request(request)
    status = scheduler._req_status[request.request_id]
    status.update_offload_keys()
    keys = [state.offload_keys for state in status.group_states]
    manager.answers = {keys[g][c]: result for (g, c), result in case.stored.items()}
    if scheduler._chunks_being_loaded is not None:
        scheduler._chunks_being_loaded.update(keys[g][c] for g, c in case.being_loaded)
    caps = {} if case.new_cap is None else {"max_num_new_tokens": case.new_cap}
    answer, _ = scheduler.get_num_new_matched_tokens(request, case.local, **caps)
    return Run(scheduler, request, case, answer)


def allocate(result: Run) -> list[bytes]:
    """Let vLLM allocate for what was answered and prepare the load; the keys that it loads."""
    case, external = result.case, result.answer or 0
    pool, boundary = _Pool(), result.boundary
    tables = []
    for index, group in enumerate(case.groups):
        manager = get_manager_for_kv_cache_spec(
            group.spec(),
            max_in_flight_tokens=1024,
            max_model_len=4096,
            block_pool=pool,
            enable_caching=case.prefix_caching,
            kv_cache_group_id=index,
            scheduler_block_size=lcm(*(other.block for other in case.groups)),
        )
        computed = _computed_blocks(manager, pool, case.local, group.block)
        name = result.request.request_id
        manager.add_local_computed_blocks(name, computed, case.local, external)
        manager.allocate_external_computed_blocks(name, case.local, external)
        manager.allocate_new_blocks(name, boundary, boundary)
        tables.append(list(manager.req_to_blocks[name]))
    result.scheduler.update_state_after_alloc(
        result.request, KVCacheBlocks(blocks=tuple(tables)), external
    )
    return result.manager.loaded


def _computed_blocks(manager: Any, pool: _Pool, local: int, block: int) -> list[Any]:
    """Blocks of the local prefix; those that attention has left behind are null."""
    skipped = max(0, manager.get_num_skipped_tokens(local)) // block
    table = [pool.null_block] * min(skipped, local // block)
    for held in pool.get_new_blocks(local // block - len(table)):
        held._block_hash = b"cached"
        table.append(held)
    return table


def problems(case: Case) -> list[str]:
    """What is wrong with ``exact`` and ``corrected`` on this case; nothing if all is well."""
    found = []
    exact, want = run(case, "exact"), expected(case)
    if exact.answer != want:
        found.append(f"exact: mismatch, {exact.answer} instead of {want}")
    if max(exact.manager.asked.values(), default=0) > 1:
        found.append("exact: asked twice")
    corrected = run(case, "corrected")
    if corrected.answer and corrected.boundary > servable(case, frozenset({HIT})):
        found.append(f"corrected: above the oracle, {corrected.boundary}")
    for mode, result in (("exact", exact), ("corrected", corrected)):
        if not result.answer:
            continue
        if is_unsafe(case, result.boundary):
            found.append(f"{mode}: unsafe, {result.boundary}")
        try:
            allocate(result)
        except (AssertionError, UnconfirmedError) as error:
            found.append(f"{mode}: load, {type(error).__name__}: {error}")
    return found


def stock_kind(case: Case) -> str:
    """How vLLM's own lookup compares with the oracle; only for settled cases."""
    want, stock = expected(case), run(case, "stock")
    if stock.answer == want:
        return "agrees"
    assert stock.answer is not None
    assert want is not None
    if is_unsafe(case, stock.boundary):
        return "unsafe"
    if stock.answer == 0:
        return "zero"
    return "lower" if stock.answer < want else "higher"


def ends_engine(case: Case) -> bool:
    """Whether vLLM's own answer makes it load what is not there, or more than it allows."""
    stock = run(case, "stock")
    try:
        if stock.answer:
            allocate(stock)
    except AssertionError:
        return True
    return False
