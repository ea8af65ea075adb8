"""The model of vLLM's search, held against the search of the vLLM that is installed."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from random_layouts import KINDS as ALL_KINDS
from random_layouts import random_layout
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
)
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.kv_offload.base import LookupResult

from kvlens.connector import compat, engine_facts
from kvlens.connector.corrections import fakes, pop_widening
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import Exit
from kvlens.telemetry.verdict.search import replay_queries, search

WIDENS = not pop_widening.present()
LOAD_WINDOW = compat.reaches_load_window()
# 0.30 reaches as far as allocation does, but for what it retains beyond the window.
RETAINS = not LOAD_WINDOW or "extra_retained_tokens" in inspect.getsource(
    GroupOffloadConfig.load_window_size_in_chunks
)
KINDS = [k for k in ALL_KINDS if k != "chunked_local" or compat.offloads_chunked_local()]


def bare_spec(group: GroupLayout) -> Any:
    """A specification with the fields that the search reads, and no others."""
    if group.recurrent:
        cls, fields = specs.MambaSpec, {"mamba_cache_mode": "align"}
    elif group.window is not None:
        cls = specs.SlidingWindowSpec
        fields = {"sliding_window": group.window, "extra_retained_tokens": group.extra_retained}
    elif group.attention_chunk is not None:
        cls = specs.ChunkedLocalAttentionSpec
        fields = {"attention_chunk_size": group.attention_chunk}
    else:
        cls, fields = specs.FullAttentionSpec, {}
    spec = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(spec, name, value)
    return spec


def config(group: GroupLayout) -> Any:
    spec = bare_spec(group)
    fields = {
        "group_idx": group.kv_group,
        "tokens_per_chunk": group.tokens_per_chunk,
        "sliding_window_size_in_chunks": compat.window_in_chunks(spec, group.tokens_per_chunk),
        "kv_cache_spec": spec,
        "is_eagle_group": group.drafter,
    }
    return GroupOffloadConfig(**{name: fields.get(name) for name in GroupOffloadConfig._fields})


class Spy(OffloadingConnectorScheduler):
    """vLLM's class with just what its search needs; keeps the queries that it makes."""

    def __init__(self, layout: Layout, results: dict[tuple[int, int], str]) -> None:
        configs = [config(group) for group in layout.groups]
        windows = {i: c.sliding_window_size_in_chunks for i, c in enumerate(configs)}
        windowed = sorted((i for i in windows if windows[i]), key=windows.__getitem__, reverse=True)
        self.asked: list[tuple[int, int, int, int | None]] = []
        self.config = SimpleNamespace(kv_group_configs=configs, tokens_per_hash=1)
        self.use_lookahead_block_hashes = layout.hash_lookahead > 0
        self.manager = SimpleNamespace(lookup=lambda key, _: LookupResult[results.get(key, "MISS")])
        self._full_attention_groups = tuple(i for i in windows if not windows[i])
        self._sliding_window_groups = tuple(windowed)
        self._lookup_groups = self._full_attention_groups + self._sliding_window_groups
        self._mamba_align_size = next(
            (g.tokens_per_chunk for g in layout.groups if g.recurrent), None
        )
        self._chunks_being_loaded = None
        self._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)

    def note(self, keys: list[tuple[int, int]], hits: int | None) -> int | None:
        kv_group, start = keys[0]
        self.asked.append((kv_group, start, len(keys), hits))
        return hits

    def _maximal_prefix_lookup(self, keys: Any, *args: Any) -> int | None:
        return self.note(keys, super()._maximal_prefix_lookup(keys, *args))

    def _sliding_window_lookup(self, keys: Any, *args: Any) -> int | None:
        return self.note(keys, super()._sliding_window_lookup(keys, *args))


class Corrected(pop_widening.apply(Spy)):  # type: ignore[misc]
    """The same, asked for one chunk more of every drafter group."""

    def __init__(self, layout: Layout, results: dict[tuple[int, int], str]) -> None:
        Spy.__init__(self, layout, results)
        self._kvlens_group_position = {group.kv_group: group.kv_group for group in layout.groups}


@dataclass
class Case:
    """A request and what the tier says of each of its chunks."""

    layout: Layout
    tokens: int
    local: int
    cap: int | None
    load_cap: int | None
    results: dict[tuple[int, int], str]

    def search(self, cls: type[Any]) -> tuple[int | None, Any]:
        """What the search of ``cls`` finds, and the searcher."""
        real = cls(self.layout, self.results)
        keys = [
            [(group.kv_group, chunk) for chunk in range(group.chunks(self.tokens))]
            for group in self.layout.groups
        ]
        status = SimpleNamespace(
            req=SimpleNamespace(
                num_tokens=self.tokens,
                request_id="r",
                block_hashes=range(self.tokens - self.layout.hash_lookahead),
            ),
            req_context=None,
            num_locally_computed_tokens=self.local, max_load_tokens=self.load_cap,
            group_states=[SimpleNamespace(offload_keys=every) for every in keys],
        )  # fmt: skip
        real._req_status = {"r": status}
        caps = [self.cap] if self.cap is not None else []
        return fakes.run_lookup(real, status, *caps), real

    def predicted(self, widen: bool) -> int:
        """What the model says of it, without deferrals."""
        return search(
            self.layout, lambda group, chunk: (group, chunk) in self.results, self.local,
            self.tokens, self.cap, widen=widen, load_window=LOAD_WINDOW, load_cap=self.load_cap,
            drafters={group.kv_group for group in self.layout.groups if group.drafter_used},
        )  # fmt: skip


def cases(odd: Sequence[str] = (), count: int = 2500) -> Iterator[Case]:
    """Random ones that this release can have; ``odd``: what a chunk may be but a hit."""
    rng = random.Random(52735)
    for _ in range(count):
        layout, tokens = random_layout(rng, KINDS, RETAINS), rng.randint(1, 120)
        layout.cap_spares_token = compat.cap_spares_token()
        for group in layout.groups:
            group.drafter = group.drafter_used
        if engine_facts.hashes_look_ahead() and rng.random() < 0.4:
            ahead = rng.choice([1, 1, 3])
            for group in layout.groups:
                group.hash_lookahead, group.drafter_used = ahead, False
        local = rng.choice([0, 0, rng.randrange(tokens)])
        cap = rng.choice([None, rng.randint(0, 120)]) if compat.bounds_by_other_groups() else None
        load_cap = rng.choice([None, None, rng.randint(0, 120)]) if compat.caps_loads() else None
        density = rng.choice([0.5, 0.9, 0.97, 1.0])
        results = {
            (group.kv_group, chunk): rng.choice([*["HIT"] * 9, *odd])
            for group in layout.groups
            for chunk in range(group.chunks(tokens))
            if rng.random() < density
        }
        yield Case(layout, tokens, local, cap, load_cap, results)


def test_model_finds_what_the_search_finds() -> None:
    served = 0
    for case in cases():
        found, _ = case.search(Spy)
        assert case.predicted(WIDENS) == case.local + (found or 0)
        served += bool(found)
    assert served > 300, "the cases must not all be misses"


@pytest.mark.parametrize("odd", [(), ("HIT_PENDING", "RETRY")])
def test_replay_tells_how_the_search_ended(odd: tuple[str, ...]) -> None:
    for case in cases(odd):
        found, real = case.search(Spy)
        replay = replay_queries(
            case.layout, case.local, case.tokens, case.cap, real.asked, case.load_cap
        )
        if found is None:
            assert replay.exit is Exit.DEFERRED_BACKEND
        else:
            assert replay.boundary == case.local + found
            assert (replay.exit is Exit.SERVED) == (found > 0)


@pytest.mark.skipif(WIDENS, reason="this vLLM widens by itself")
def test_the_correction_widens_as_later_releases_do() -> None:
    gained = 0
    for case in cases():
        found, _ = case.search(Corrected)
        assert case.predicted(widen=True) == case.local + (found or 0)
        gained += case.predicted(widen=True) > case.predicted(widen=False)
    assert gained > 10, "the correction must matter in some cases"


def test_layout_windows_are_those_of_vllm() -> None:
    group = GroupLayout(0, "sliding_window", 16, 16, window=128)
    assert config(group).sliding_window_size_in_chunks == 8
