"""Numbers read from a server's ``/metrics`` page."""

from __future__ import annotations

from typing import Final

import msgspec

LOST: Final = "lost."
"""Counters of lost tokens are called this and the cause."""
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
        """Whether anything on the page comes from an offload connector."""
        return self.instrumented or "store_bytes" in self.counters


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
