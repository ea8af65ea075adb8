"""The model of vLLM's search: against the real class, and what it tells of a lookup."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvlens.telemetry.oracle import is_full_attention, is_recurrent
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.search import replay_queries, search
from kvlens.telemetry.semconv import Exit


def group(kv_group: int, kind: str, chunk: int, **fields: Any) -> GroupLayout:
    return GroupLayout(
        kv_group=kv_group, group_kind=kind, tokens_per_block=chunk, tokens_per_chunk=chunk, **fields
    )


def layout(*groups: GroupLayout) -> Layout:
    return Layout(groups=list(groups), tokens_per_hash=1)


def full(kv_group: int, chunk: int, drafter: bool = False) -> GroupLayout:
    return group(kv_group, "full_attention", chunk, drafter_used=drafter)


def mamba(kv_group: int, chunk: int, drafter: bool = False) -> GroupLayout:
    return group(kv_group, "mamba", chunk, drafter_used=drafter)


@pytest.mark.parametrize(
    ("groups", "local", "tokens", "asked", "exit_", "veto", "answers"),
    [
        # F1, one stored chunk: found in the first group, popped, nothing left
        ([full(0, 2128, True), mamba(1, 2128, True)], 0, 5000, [(0, 0, 2, 1)],
         Exit.POPPED_OUT, 0, [(0, 1, 0, 1)]),
        # F7: the pop shrinks the boundary below the coarser sibling's chunk
        ([full(0, 16, True), mamba(1, 64)], 0, 81, [(0, 0, 4, 4)],
         Exit.POPPED_OUT, 0, [(0, 1, 48, 1)]),
        # F5: every other group holds the prompt, one window holds nothing
        ([full(0, 816), group(1, "sliding_window", 816, window=4)], 0, 84865,
         [(0, 0, 104, 104), (1, 0, 104, 0)], Exit.VETOED, 1, [(0, 0, 84864, 1), (1, 0, 0, 1)]),
        ([full(0, 16)], 0, 81, [(0, 0, 5, 0)], Exit.MISS, None, [(0, 0, 0, 1)]),
        ([full(0, 512)], 1008, 1100, [], Exit.COVERED, None, []),  # N9
        ([full(0, 16), mamba(1, 64)], 0, 300, [(0, 0, 16, 3)],
         Exit.BELOW_CHUNK, 0, [(0, 0, 48, 1)]),
        ([full(0, 16)], 0, 81, [(0, 0, 5, None)], Exit.DEFERRED_BACKEND, None, [(0, 0, 80, 1)]),
        # F13 on stock: the boundary is lowered under the state, and stays there
        ([full(0, 16), mamba(1, 64)], 0, 300, [(0, 0, 16, 11), (1, 0, 3, 3)],
         Exit.SERVED, None, [(0, 0, 176, 1), (1, 0, 176, 1)]),
        # a window lowers the boundary, and the windows before it are asked again
        ([full(0, 16), group(1, "sliding_window", 16, window=32),
          group(2, "sliding_window", 16, window=16)], 0, 97,
         [(0, 0, 6, 6), (1, 0, 6, 6), (2, 0, 6, 3), (1, 0, 3, 3), (2, 0, 3, 3)],
         Exit.SERVED, None,
         [(0, 0, 96, 1), (1, 0, 96, 1), (2, 0, 48, 1), (1, 0, 48, 2), (2, 0, 48, 2)]),
    ],
)  # fmt: skip
def test_replay_tells_how_a_lookup_ended(groups, local, tokens, asked, exit_, veto, answers):
    replay = replay_queries(layout(*groups), local, tokens, None, asked)
    assert (replay.exit, replay.vetoing_group) == (exit_, veto)
    got = [(a.kv_group, a.popped, a.boundary, a.pass_number) for a in replay.answers]
    assert got == answers


def test_smallest_changes_that_serve_what_was_lost():
    every: Callable[[int, int], bool] = lambda _group, _chunk: True  # noqa: E731
    found = layout(full(0, 16), mamba(1, 64))
    assert search(found, every, 0, 81, drafters={0}, widen=False, load_window=False) == 0
    assert search(found, every, 0, 81, drafters={0}, widen=True, load_window=False) == 64
    assert search(found, every, 0, 81, drafters=(), widen=False, load_window=False) == 64


# --- against the vLLM that is installed ---------------------------------------


class Vllm:
    """A real OffloadingConnectorScheduler with just what its search needs."""

    def __init__(self) -> None:
        module = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
        self.scheduler: Any = pytest.importorskip(module, reason="vLLM is not installed")
        from vllm.v1 import kv_cache_interface
        from vllm.v1.kv_offload.base import LookupResult

        self.specs = kv_cache_interface
        self.result = LookupResult
        self.group_fields = self.scheduler.GroupOffloadConfig._fields
        source = inspect.getsource(
            self.scheduler.OffloadingConnectorScheduler._lookup_complete_chunks
        )
        self.load_window = "load_window_size_in_chunks" in source
        self.caps = "max_num_new_tokens" in source
        self.widens = "is_eagle_unverified and sliding_window_size_in_chunks" not in source

    def spec(self, group: GroupLayout) -> Any:
        if is_recurrent(group):
            cls, fields = self.specs.MambaSpec, {"mamba_cache_mode": "align"}
        elif group.window is not None:
            cls = self.specs.SlidingWindowSpec
            fields = {
                "sliding_window": group.window, "extra_retained_tokens": group.extra_retained,
            }  # fmt: skip
        elif group.attention_chunk is not None:
            cls = self.specs.ChunkedLocalAttentionSpec
            fields = {"attention_chunk_size": group.attention_chunk}
        else:
            cls, fields = self.specs.FullAttentionSpec, {}
        spec = object.__new__(cls)  # only the fields that the search reads
        for name, value in fields.items():
            object.__setattr__(spec, name, value)
        return spec

    def config(self, group: GroupLayout) -> Any:
        spec = self.spec(group)
        fields = {
            "group_idx": group.kv_group,
            "tokens_per_chunk": group.tokens_per_chunk,
            "sliding_window_size_in_chunks": self.scheduler.get_sliding_window_size_in_chunks(
                spec, group.tokens_per_chunk
            ),
            "kv_cache_spec": spec,
            "is_eagle_group": group.drafter_used,
        }
        return self.scheduler.GroupOffloadConfig(
            **{name: fields.get(name) for name in self.group_fields}
        )

    def lookup(
        self, layout: Layout, local: int, tokens: int, results: dict[tuple[int, int], str],
        cap: int | None, load_cap: int | None,
    ) -> tuple[int | None, list[tuple[int, int, int, int | None]]]:  # fmt: skip
        """Result of the real search, and the queries that it made."""
        real = self.scheduler.OffloadingConnectorScheduler
        me = object.__new__(real)
        configs = [self.config(group) for group in layout.groups]
        keys = [
            [(g.kv_group, k) for k in range(tokens // g.tokens_per_chunk)] for g in layout.groups
        ]
        me.config = SimpleNamespace(kv_group_configs=configs)
        me.manager = SimpleNamespace(lookup=lambda key, _ctx: self.result[results.get(key, "MISS")])
        prefix = [i for i, c in enumerate(configs) if c.sliding_window_size_in_chunks is None]
        windowed = [i for i in range(len(configs)) if i not in prefix]
        windowed.sort(key=lambda i: configs[i].sliding_window_size_in_chunks, reverse=True)
        me._full_attention_groups = tuple(prefix)
        me._sliding_window_groups = tuple(windowed)
        me._lookup_groups = (*prefix, *windowed)
        me._mamba_align_size = next(
            (g.tokens_per_chunk for g in layout.groups if is_recurrent(g)), None
        )
        me._chunks_being_loaded = None
        me._events_tracker = SimpleNamespace(record_lookup=lambda *_args: None)
        asked: list[tuple[int, int, int, int | None]] = []

        def spy(name: str) -> None:
            def query(keys: Any, *args: Any) -> int | None:
                keys = list(keys)
                hits = getattr(real, name)(me, keys, *args)
                kv_group, start = keys[0] if keys else (-1, 0)
                asked.append((kv_group, start, len(keys), hits))
                return hits

            setattr(me, name, query)

        spy("_maximal_prefix_lookup")
        spy("_sliding_window_lookup")
        status = SimpleNamespace(
            req=SimpleNamespace(num_tokens=tokens, request_id="r"), req_context=None,
            num_locally_computed_tokens=local, max_load_tokens=load_cap,
            group_states=[SimpleNamespace(offload_keys=found) for found in keys],
        )  # fmt: skip
        return me._lookup_complete_chunks(status, *((cap,) if self.caps else ())), asked


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    return Vllm()


def random_layout(rng: random.Random) -> Layout:
    groups = []
    state = rng.choice([2, 4, 8, 12, 16])
    for i in range(rng.randint(1, 4)):
        kind = rng.choice(["full_attention", "sliding_window", "chunked_local", "mamba"])
        chunk = state if kind == "mamba" else rng.choice([1, 2, 3, 4, 6, 8, 16])
        new = group(i, kind, chunk, drafter_used=rng.random() < 0.35)
        if kind == "sliding_window":
            new.window, new.extra_retained = rng.randint(1, 20), rng.choice([0, 0, 1, 3])
        if kind == "chunked_local":
            new.attention_chunk = rng.randint(1, 20)
        groups.append(new)
    return layout(*groups)


@pytest.mark.parametrize("deferrals", [False, True])
def test_model_agrees_with_the_real_search(vllm: Vllm, deferrals: bool):
    rng = random.Random(52735)
    served = 0
    for _ in range(2500):
        found, tokens = random_layout(rng), rng.randint(1, 120)
        local = rng.choice([0, 0, rng.randrange(tokens)])
        cap = rng.choice([None, rng.randint(0, 120)]) if vllm.caps else None
        load_cap = rng.choice([None, None, rng.randint(0, 120)]) if vllm.caps else None
        density = rng.choice([0.5, 0.9, 0.97, 1.0])
        odd = ["HIT_PENDING", "RETRY"] if deferrals else []
        results = {
            (g.kv_group, k): rng.choice([*["HIT"] * 9, *odd])
            for g in found.groups
            for k in range(tokens // g.tokens_per_chunk)
            if rng.random() < density
        }
        real, asked = vllm.lookup(found, local, tokens, results, cap, load_cap)
        assert all(width for _, _, width, _ in asked), "a query always names its group"
        replay = replay_queries(found, local, tokens, cap, asked, load_cap)
        if real is None:
            assert replay.exit is Exit.DEFERRED_BACKEND
        else:
            assert replay.boundary == local + real
            assert (replay.exit is Exit.SERVED) == (real > 0)
        if not deferrals:
            predicted = search(
                found, lambda g, k, r=results: (g, k) in r, local, tokens, cap,
                drafters={g.kv_group for g in found.groups if g.drafter_used},
                widen=vllm.widens, load_window=vllm.load_window, load_cap=load_cap,
            )  # fmt: skip
            assert predicted == local + (real or 0)
            served += predicted > local
    assert deferrals or served > 300, "the cases must not all be misses"


def test_layout_windows_are_those_of_vllm(vllm: Vllm):
    found = group(0, "sliding_window", 16, window=128)
    assert vllm.config(found).sliding_window_size_in_chunks == 8
    assert not is_full_attention(found)
    assert dataclasses.is_dataclass(vllm.spec(found))
