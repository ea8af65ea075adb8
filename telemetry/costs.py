"""What recomputing costs: the engine's own prefill rate, and the device time of lost tokens.

The rate is taken from steps that computed at least :data:`MIN_TOKENS` prompt
tokens: seconds per token is the median over the last :data:`WINDOW` of them,
so that single slow steps (compilation, a pause of the scheduler) do not count.
Decoding that rides along in such a step is in its time, as it is when lost
tokens are computed again. Device time is that time on every device of the
engine.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_TOKENS = 64
"""Prompt tokens that a step must compute to tell the rate."""
WINDOW = 64


class PrefillRate:
    """Seconds that this engine takes per prompt token."""

    def __init__(self, devices: int = 1) -> None:
        """``devices`` work on each token (tensor times pipeline parallel size)."""
        if devices < 1:
            raise ValueError(f"devices must be at least 1, got {devices}")
        self._devices = devices
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._median: float | None = None

    def step(self, seconds: float, tokens: int) -> None:
        """Note a step of ``seconds`` that computed ``tokens`` prompt tokens."""
        if tokens >= MIN_TOKENS and seconds > 0:
            self._samples.append(seconds / tokens)
            self._median = None

    @property
    def seconds_per_token(self) -> float | None:
        """Median of the window, None before the first sample."""
        if self._median is None and self._samples:
            self._median = median(self._samples)
        return self._median

    @property
    def tokens_per_second(self) -> float | None:
        """Prompt tokens per second, None before the first sample."""
        seconds = self.seconds_per_token
        return None if seconds is None else 1 / seconds

    def device_seconds(self, tokens: int) -> float:
        """Device time that ``tokens`` take to compute; 0 while the rate is unknown."""
        return tokens * (self.seconds_per_token or 0.0) * self._devices
