"""Prompts for traces, which name blocks but not tokens: equal blocks, equal tokens."""

from __future__ import annotations

from kvlens.connector.simulation.engine import VOCABULARY
from kvlens.connector.simulation.runner import FIRST_TOKEN
from kvlens.telemetry.sizing.trace import TraceRequest

_BASE = VOCABULARY - FIRST_TOKEN - 1
_DIGITS = 5
"""Tokens that spell an id: ids go up to 2**63."""
_FILL = VOCABULARY - 1
_ALIKE = 8
"""Tokens with which every block begins. Since 0.34 a block's hash may cover what follows as well:
if those told which block follows, a prefix that two prompts share would lose its last block."""


class Prompts:
    """Makes token ids of up to ``block_tokens`` for each block."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._fill = [_FILL] * block_tokens
        self._alike = [_FILL] * max(0, min(_ALIKE, block_tokens - _DIGITS))

    def tokens(self, request: TraceRequest) -> list[int]:
        """A prompt: each block is spelt near its start, what no block covers by the last one's id.

        vLLM hashes prefixes: an id near a block's start makes all finer blocks behind it differ.
        """
        made: list[int] = []
        for one in request.ids:
            made += self._block(one)
        made += self._block(request.ids[-1] if request.ids else 0)
        return made[: request.tokens]

    def _block(self, one: int) -> list[int]:
        return (self._alike + _spelt(one) + self._fill)[: self._size]


def _spelt(one: int) -> list[int]:
    digits = []
    for _ in range(_DIGITS):
        one, digit = divmod(one, _BASE)
        digits.append(FIRST_TOKEN + digit)
    return digits
