"""Prompts for traces, which name blocks but not tokens: equal blocks, equal tokens."""

from __future__ import annotations

from kvlens.connector.simulation.engine import VOCABULARY
from kvlens.connector.simulation.runner import FIRST_TOKEN
from kvlens.telemetry.sizing.trace import TraceRequest

_BASE = VOCABULARY - FIRST_TOKEN - 1
_DIGITS = 5
"""Tokens that spell an id: ids go up to 2**63."""
_FILL = VOCABULARY - 1


class Prompts:
    """Makes token ids of up to ``block_tokens`` for each block."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._fill = [_FILL] * block_tokens

    def tokens(self, request: TraceRequest) -> list[int]:
        """A prompt: each block begins with its id, and what no block covers is spelt by the last.

        vLLM hashes prefixes: an id at a block's start makes all finer blocks behind it differ.
        """
        made: list[int] = []
        for one in request.ids:
            made += (_spelt(one) + self._fill)[: self._size]
        made += (_spelt(request.ids[-1] if request.ids else 0) + self._fill)[: self._size]
        return made[: request.tokens]


def _spelt(one: int) -> list[int]:
    digits = []
    for _ in range(_DIGITS):
        one, digit = divmod(one, _BASE)
        digits.append(FIRST_TOKEN + digit)
    return digits
