"""Lookups on vLLM's own scheduler class, held against the definition tried everywhere.

``expected`` tries every boundary with ``telemetry.oracle.is_servable``. ``run`` does the
lookup and ``allocate`` lets vLLM's own block managers allocate for what was answered,
and the connector prepare the load. ``problems`` says what is wrong with a case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import lcm
from types import SimpleNamespace
from typing import Any

from lookup_cases import HIT, MISS, PENDING, RETRY, UNIT, Case
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    OffloadingManager,
    RequestOffloadingContext,
    make_offload_key,
)

from kvlens.connector import compat
from kvlens.connector.boundary import UnconfirmedError
from kvlens.connector.config import load
from kvlens.connector.corrections import plan
from kvlens.connector.scheduler import scheduler_class
from kvlens.telemetry.verdict.oracle import is_servable, limit, required_chunks


def overloads(case: Case, boundary: int) -> bool:
    """Whether an assertion of vLLM forbids to load what this boundary needs.

    It limits the blocks that a windowed group loads; older releases leave
    ``extra_retained_tokens`` out of that limit, which their allocation does not.
    """
    for group in case.groups:
        if group.window is not None:
            chunk = group.block * case.blocks_per_chunk
            window = compat.window_in_chunks(group.spec(), chunk)
            most = window * case.blocks_per_chunk + 1
            first = max(case.local, boundary - group.window + 1 - group.extra)
            if -(-boundary // group.block) - first // group.block > most:
                return True
    return False


def servable(case: Case, results: frozenset[Any]) -> int:
    """Largest boundary by definition if chunks with one of ``results`` are hits."""
    shape = case.layout
    top = limit(shape, case.local, case.tokens, case.cap)
    for boundary in range(top, case.local, -1):
        if _is_tail(case, boundary, results):
            return boundary
        if is_servable(
            shape,
            lambda group, chunk: case.stored.get((group, chunk)) in results,
            case.local,
            case.tokens,
            boundary,
            case.cap,
        ) and not overloads(case, boundary):
            return boundary
    return case.local


def _is_tail(case: Case, boundary: int, results: frozenset[Any]) -> bool:
    """Whether a partial last block can be served up to ``boundary``."""
    if not case.partial_tail or boundary % UNIT or boundary % case.groups[0].block == 0:
        return False
    groups = range(len(case.groups))
    return (
        all(case.tail_key(group, boundary) // UNIT <= case.keyed // UNIT for group in groups)
        and all(case.stored.get(key) in results for key in _below_tail(case, boundary))
        and all(case.tail(group, boundary) in results for group in groups)
    )


def _below_tail(case: Case, boundary: int) -> list[tuple[int, int]]:
    """Complete chunks that a tail needs: those of attention, and no state."""
    block = case.groups[0].block
    return [
        (group.kv_group, chunk)
        for group in case.layout.groups
        if not group.recurrent
        for chunk in range(case.local // block, boundary // block)
    ]


def expected(case: Case) -> int | None:
    """What an exact lookup answers: tokens beyond the local ones, None to wait."""
    best = servable(case, frozenset({HIT, PENDING, RETRY}))
    if best == case.local:
        return 0
    if best != servable(case, frozenset({HIT})):
        return None
    if case.partial_tail and best % case.groups[0].block:
        needed = _below_tail(case, best)
        # A drafter's key may be that of a complete chunk.
        for group in range(len(case.groups)):
            chunk, rest = divmod(case.tail_key(group, best), case.groups[group].block)
            needed += [(group, chunk - 1)] if rest == 0 else []
    else:
        needed = [
            (group.kv_group, chunk)
            for group in case.layout.groups
            for chunk in required_chunks(group, case.local, best) or ()
        ]
    return None if case.being_loaded.intersection(needed) else best - case.local


def is_unsafe(case: Case, boundary: int) -> bool:
    """Whether a recurrent group has no state at this boundary, or no token is left to compute."""
    shape = case.layout
    if _is_tail(case, boundary, frozenset({HIT})):
        return False
    return boundary > limit(shape, 0, case.tokens) or any(
        group.recurrent and boundary % group.tokens_per_chunk for group in shape.groups
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
    skip_reading_external_kv: bool = False
    resumable: bool = False
    shared_prefix_boundary: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


class _Pool:
    """A block pool that never runs out."""

    def __init__(self) -> None:
        self.null_block = KVCacheBlock(0)
        self.null_block.is_null = True
        self.num_hash_lookahead_tokens = 0
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
        extra_config={},
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(
                    group_id=i,
                    tokens_per_block=group.block,
                    sliding_window_size_in_chunks=compat.window_in_chunks(
                        group.spec(), group.block * case.blocks_per_chunk
                    ),
                )
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
        num_hash_lookahead_tokens=case.lookahead,
    )
    cache_groups = []
    for index, group in enumerate(case.groups):
        cache_group = KVCacheGroupSpec([f"layer{index}"], group.spec())
        cache_group.is_eagle_group = group.drafter
        cache_groups.append(cache_group)
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=cache_groups,
        cache_hit_alignment_tokens=UNIT if case.fine_hits else None,
    )
    scheduler = _class(mode)[0](spec, vllm_config, kv_cache_config)
    scheduler.scripted = manager
    params = None if case.load_cap is None else {"max_load_tokens": case.load_cap}
    hashes = [b"%031d." % index for index in range(case.keyed // UNIT)]
    request = _Request("request", case.tokens, params, hashes)
    scheduler.on_new_request(request)
    status = scheduler._req_status[request.request_id]
    status.update_offload_keys()
    keys = [state.offload_keys for state in status.group_states]
    manager.answers = {keys[g][c]: result for (g, c), result in case.stored.items()}
    for (group, tokens), result in case.tails.items():
        manager.answers[make_offload_key(hashes[tokens // UNIT - 1], group)] = result
    if mode != "stock":  # it may take every group for a drafter's
        assert getattr(scheduler.config, "supports_partial_tail", False) == case.partial_tail
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
        setattr(held, "_block_hash" if hasattr(held, "_block_hash") else "block_hash", b"cached")
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
