"""What came of a trace with one lookup: sums, so that a million records need no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlens.telemetry.records import EngineInfo, RequestRecord


class Findings(Protocol):
    """Detectors over records as they come."""

    def observe(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has finished."""

    def deferred(self, record: RequestRecord, engine: EngineInfo) -> None:
        """A request has been waiting for long."""

    def found(self) -> Sequence[Any]:
        """Incidents so far."""


@dataclass
class Sums:
    """One lookup's result; tokens are prompt tokens."""

    lookup: str
    findings: Findings
    engine: EngineInfo | None = None
    requests: int = 0
    prompt: int = 0
    local: int = 0
    served: int = 0
    servable: int = 0
    expected: int = 0
    evicted: int = 0
    lost: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    """Tokens lost, by cause."""

    def finished(self, record: RequestRecord, engine: EngineInfo) -> None:
        """Count a finished request."""
        self.engine = engine
        self.requests += 1
        self.prompt += record.prompt_tokens
        self.local += record.local_tokens
        self.served += record.served_tokens
        self.servable += record.servable_tokens
        self.expected += record.expected_tokens
        self.evicted += record.evicted_tokens
        self.lost += record.lost_tokens
        self.verdicts[record.verdict] += 1
        if record.lost_tokens:
            self.causes[record.cause or "not_attributable"] += record.lost_tokens
        self.findings.observe(record, engine)

    def waiting(self, record: RequestRecord, engine: EngineInfo) -> None:
        """Hand an in-flight record on."""
        self.findings.deferred(record, engine)

    def as_json(self) -> dict[str, Any]:
        """The documented object."""
        assert self.engine is not None
        return {
            "vllm_version": self.engine.vllm_version,
            "lookup": self.lookup,
            "corrections": self.engine.corrections,
            "requests": self.requests,
            "prompt_tokens": self.prompt,
            "local_tokens": self.local,
            "served_tokens": self.served,
            "servable_tokens": self.servable,
            "expected_tokens": self.expected,
            "evicted_tokens": self.evicted,
            "lost_tokens": self.lost,
            "verdicts": dict(self.verdicts.most_common()),
            "lost_by_cause": dict(self.causes.most_common()),
            "incidents": list(self.findings.found()),
        }


def as_text(name: str, arms: Sequence[Sums]) -> str:
    """The lookups side by side, then what went wrong with each."""
    first = arms[0]
    assert first.engine is not None
    lines = [
        f"{name}: vLLM {first.engine.vllm_version}, {first.requests:,} requests, {first.prompt:,} "
        f"prompt tokens",
        "",
        f"  {'tokens':<22}" + "".join(f"{arm.lookup:>16}" for arm in arms),
    ]
    for label, field_name in (
        ("GPU's own cache", "local"),
        ("served by the tier", "served"),
        ("servable", "servable"),
        ("evicted, not served", "evicted"),
        ("lost", "lost"),
    ):
        cells = "".join(f"{getattr(arm, field_name):>16,}" for arm in arms)
        lines.append(f"  {label:<22}{cells}")
    shares = "".join(f"{arm.served / max(1, arm.prompt):>16.2%}" for arm in arms)
    lines += [f"  {'share served':<22}{shares}", ""]
    for arm in arms:
        verdicts = ", ".join(
            f"{count:,} {verdict}" for verdict, count in arm.verdicts.most_common()
        )
        lines.append(f"  {arm.lookup}: {verdicts}")
        for cause, tokens in arm.causes.most_common():
            lines.append(f"    {tokens:,} tokens lost: {cause}")
        for incident in arm.findings.found():
            lines.append(f"    {incident.severity} incident {incident.kind}: {incident.summary}")
            lines.append(f"      next: {incident.next_step}")
    return "\n".join(lines) + "\n"
