"""Numbers read from a server's ``/metrics`` page."""

from __future__ import annotations

from typing import Final

import msgspec

LOST: Final = "lost."
"""Counters of lost tokens are called this and the cause."""
SOURCE: Final = "source."
"""Counters of prompt tokens are called this and where vLLM says that they came from."""
STORED_ELSEWHERE: Final = "other_stored"
"""Counter of what another connector than vLLM's own says it stored."""
VERDICT: Final = "verdict."
"""Counters of requests are called this and the verdict."""


class Reading(msgspec.Struct, kw_only=True):
    """One engine on one page. A series that is not on the page has no entry."""

    engine: str
    model: str
    started_at: float | None = None
    """Start of the server's process, Unix seconds."""
    counters: dict[str, float] = {}
    gpu_usage: float | None = None
    gpu_tokens: float | None = None
    """Tokens that the GPU cache holds."""
    hash_algorithm: str = ""
    prompt_lengths: dict[float, float] = {}
    """Prompts of at most that many tokens."""
    computed_lengths: dict[float, float] = {}
    """Prompts of which at most that many tokens were computed."""
    load_sizes: dict[float, float] = {}
    """Loads of at most that many bytes."""
    waiting: dict[str, float] = {}
    """Requests that wait just now, by vLLM's reason."""
    windows: bool = False
    """Whether the page says that the model has sliding windows."""
    offloading: bool = False
    """Whether vLLM's offload connector is loaded, even if it has stored nothing."""
    pinned: list[str] = []
    """Gauges of what transfers pin: named only, so that people are told that they mislead."""
    deprecated: bool = False
    """Whether vLLM's deprecated byte counters are there."""
    transfers: bool = False
    """Whether a connector passes KV from prefill to decode servers (NIXL)."""
    other: str = ""
    """Another connector or engine whose series were read, as ``connectors`` calls it."""
    vllm: bool = True
    """False: another engine's page, or a cache server's."""
    info: dict[str, str] = {}
    """Labels of ``kvlens_info``; empty on a stock engine."""
    capacity_chunks: float | None = None
    resident_chunks: dict[str, float] = {}
    """By group; only where kvlens replays them, never vLLM's usage gauge of transfers."""
    fallback: bool = False
    """An invariant failed, so that vLLM's own lookup is used."""

    @property
    def instrumented(self) -> bool:
        """Whether kvlens' own numbers are there."""
        return "expected_tokens" in self.counters

    @property
    def offloads(self) -> bool:
        """Whether anything on the page comes from a KV connector that is in use."""
        seen = self.instrumented or self.offloading or "store_bytes" in self.counters
        return seen or self.counters.get("external_queries", 0.0) > 0 or self.stores_elsewhere

    @property
    def stores_elsewhere(self) -> bool:
        """Whether another connector than vLLM's own tells what it stored."""
        return STORED_ELSEWHERE in self.counters


class Scrape(msgspec.Struct, kw_only=True):
    """One attempt to scrape one target."""

    target: str
    """Host and port, or what the configuration calls it."""
    time: float
    """Unix seconds."""
    readings: list[Reading] = []
    error: str = ""
    """Why it failed; empty when it did not."""
    gone: bool = False
    """The target is no longer configured."""
