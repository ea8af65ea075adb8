"""What happened between two readings of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.dashboard.scrape.counting import LOST, VERDICT
from kvlens.dashboard.scrape.reading import Reading


@dataclass(frozen=True)
class Window:
    """Counters' rises from ``before`` to ``after``.

    Without ``before`` everything since the start counts. A counter that is only
    on the later page rose from 0: vLLM creates most series at their first use.
    """

    before: Reading | None
    after: Reading
    seconds: float | None = None
    """Time between both, None if not known."""
    peak_usage: float | None = None
    """Highest use of the GPU cache seen in between, if more is known than both ends."""

    @property
    def restarted(self) -> bool:
        """Whether the server began anew in between, so that everything is cold."""
        return self.before is not None and restarted(self.before, self.after)

    def has(self, name: str) -> bool:
        """Whether a counter exists."""
        return name in self.after.counters

    def rise(self, name: str) -> float:
        """By how much a counter rose: from 0 after a restart, 0 if it does not exist."""
        value = self.after.counters.get(name, 0.0)
        return value if self.before is None or self.restarted else value - self.earlier(name)

    def earlier(self, name: str) -> float:
        """A counter at the beginning."""
        return 0.0 if self.before is None else self.before.counters.get(name, 0.0)

    def lost(self) -> dict[str, float]:
        """Lost tokens by cause, the largest first."""
        rises = {
            name.removeprefix(LOST): self.rise(name)
            for name in self.after.counters
            if name.startswith(LOST)
        }
        return dict(sorted(((k, v) for k, v in rises.items() if v > 0), key=lambda kv: -kv[1]))

    def verdicts(self, *verdicts: str) -> float:
        """Requests with one of these verdicts."""
        return sum(self.rise(VERDICT + verdict) for verdict in verdicts)

    @property
    def usage(self) -> float | None:
        """Highest known use of the GPU cache, 0 to 1."""
        ends = [self.peak_usage, self.after.gpu_usage]
        if self.before is not None and not self.restarted:
            ends.append(self.before.gpu_usage)
        return max((usage for usage in ends if usage is not None), default=None)


def restarted(before: Reading, after: Reading) -> bool:
    """Whether ``after`` is of a later process: another start time, or a counter fell."""
    if (
        before.started_at is not None
        and after.started_at is not None
        and abs(before.started_at - after.started_at) > 1.0
    ):
        return True
    return any(after.counters.get(name, 0.0) < value for name, value in before.counters.items())
