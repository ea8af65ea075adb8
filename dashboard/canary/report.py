"""What a canary found. Positions and counts only: no token ids, no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

_SHOWN: Final = 10


class CanaryStatus(str, Enum):
    """The outcome."""

    OK = "ok"
    """Something was reloaded, and no answer differed."""
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    """No answer differed, but none is known to have used reloaded KV either."""


class Asked(str, Enum):
    """Which of a turn's two answers from caches."""

    GOING_ON = "going_on"
    """The conversation's next prompt: what came before it may be reloaded."""
    AGAIN = "again"
    """The same prompt once more: all of it may be reloaded."""


@dataclass(frozen=True)
class Mismatch:
    """An answer that differs from the recomputed one."""

    conversation: int
    turn: int
    asked: Asked
    position: int
    """The first token of the answer that differs, from 0."""
    prompt_tokens: int
    reloaded_tokens: int | None
    """Of this prompt; None if the server's counters do not tell."""


@dataclass
class CanaryReport:
    """Result of a run; field names are those of ``--json``."""

    model: str
    seed: int
    conversations: int = 0
    turns: int = 0
    """Of all conversations."""
    answers: int = 0
    """Compared with recomputed ones."""
    reloaded_conversations: int = 0
    """With at least one answer that used reloaded KV."""
    reloaded_answers: int = 0
    served_tokens: int = 0
    """Reloaded from the offload tier for these answers."""
    rounded_answers: int = 0
    """Differ from the recomputed ones, but are what the GPU cache alone gives as well."""
    unstable_answers: int = 0
    """Left out: they differ, but so do those without reloading among themselves."""
    unattributed_answers: int = 0
    """What was reloaded for them is not known, as other requests came in between."""
    evicted_by: str = ""
    """``reset`` (the server's ``/reset_prefix_cache``) or ``prompts`` (other ones)."""
    has_counters: bool = True
    """Whether the server counts what its offload tier serves."""
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def status(self) -> CanaryStatus:
        """The outcome."""
        if self.mismatches:
            return CanaryStatus.MISMATCH
        return CanaryStatus.OK if self.reloaded_answers else CanaryStatus.INCONCLUSIVE

    @property
    def reason(self) -> str:
        """Why it is that outcome, and what to do where nothing was shown."""
        if self.mismatches:
            return (
                f"{len(self.mismatches)} of {self.answers} answers differ from what the server "
                "gives without reloading"
            )
        if self.reloaded_answers:
            return (
                f"{self.reloaded_answers} of {self.answers} answers used reloaded KV, and each is "
                "what the server gives without reloading, token for token"
            )
        if not self.has_counters:
            return (
                "the server has no counters of its offload tier: start it with a KV connector and "
                "without --disable-log-stats"
            )
        if self.unattributed_answers:
            return "other requests came in between: run it while the server is idle"
        if self.unstable_answers == self.answers:
            return "the server's answers differ even when each is recomputed"
        return (
            "nothing was reloaded: prompts may be shorter than the connector's chunk "
            "(--prompt-tokens), the tier smaller than the GPU cache, or its lookups find nothing "
            "(kvlens doctor)"
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        found = asdict(self)
        mismatches = found.pop("mismatches")
        return {
            "status": str(self.status.value),
            "reason": self.reason,
            **found,
            "mismatches": [{**one, "asked": one["asked"].value} for one in mismatches],
        }


def text(report: CanaryReport) -> str:
    """For people."""
    lines = [
        f"{report.status.value}: {report.reason}.",
        f"{report.conversations} conversations ({report.reloaded_conversations} with reloads), "
        f"{report.turns} turns, {report.served_tokens:,} tokens served from the offload tier; "
        f"the GPU cache was emptied by {report.evicted_by or 'nothing'}.",
    ]
    if report.rounded_answers:
        lines.append(
            f"{report.rounded_answers} answers are not the recomputed ones but those that the "
            "GPU cache gives: a matter of rounding."
        )
    if report.unstable_answers:
        lines.append(
            f"{report.unstable_answers} answers left out: the server does not repeat them even "
            "without reloading."
        )
    lines += _mismatches(report.mismatches)
    return "\n".join(lines)


def _mismatches(mismatches: Sequence[Mismatch]) -> list[str]:
    lines = [
        f"  conversation {one.conversation}, turn {one.turn} ({one.asked.value}): token "
        f"{one.position} of the answer differs; prompt of {one.prompt_tokens:,} tokens, "
        + (
            "reloaded not known"
            if one.reloaded_tokens is None
            else f"{one.reloaded_tokens:,} reloaded"
        )
        for one in mismatches[:_SHOWN]
    ]
    if len(mismatches) > _SHOWN:
        lines.append(f"  and {len(mismatches) - _SHOWN} more (--json FILE has all)")
    return lines
