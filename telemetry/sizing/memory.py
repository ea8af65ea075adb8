"""From blocks to bytes: what a token's KV data takes in a tier."""

from __future__ import annotations

from typing import Final, NamedTuple

GIB: Final = 2**30


class Memory(NamedTuple):
    """What a prompt's tokens take in the tier of one engine, over all its devices."""

    bytes_per_token: float | None = None
    chunks_per_token: float | None = None
    """Slots of vLLM's tier, over all KV-cache groups."""

    def gib(self, tokens: int) -> float | None:
        """GiB of ``tokens``; None if unknown."""
        return None if self.bytes_per_token is None else tokens * self.bytes_per_token / GIB

    def chunks(self, tokens: int) -> int | None:
        """Slots of ``tokens``; None if unknown."""
        return None if self.chunks_per_token is None else round(tokens * self.chunks_per_token)
