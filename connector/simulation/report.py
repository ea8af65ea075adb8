"""What a simulation says: JSON for programs, a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import msgspec

from kvlens.connector.simulation.driver import Result
from kvlens.telemetry.records import RequestRecord
from kvlens.telemetry.semconv import QUIET_VERDICTS

_COLUMNS = ("request", "prompt", "local", "served", "servable", "expected", "lost", "verdict",
            "cause")  # fmt: skip
_LEFT = frozenset({"request", "verdict", "cause"})
_SILENT = frozenset(map(str, QUIET_VERDICTS))


class Finding(Protocol):
    """An incident, as far as the report reads it."""

    @property
    def kind(self) -> str:
        """What was found."""

    @property
    def severity(self) -> str:
        """``critical`` or ``warning``."""

    @property
    def summary(self) -> str:
        """One sentence."""

    @property
    def next_step(self) -> str:
        """What to do."""


def as_json(results: Sequence[tuple[Result, Sequence[Finding]]]) -> bytes:
    """The documented JSON: a list with one object per scenario."""
    whole = [
        {
            "scenario": result.name,
            "vllm_version": result.engine.vllm_version,
            "lookup": result.engine.lookup,
            "corrections": result.engine.corrections,
            "requests": result.requests,
            "incidents": list(incidents),
        }
        for result, incidents in results
    ]
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def as_text(result: Result, incidents: Sequence[Finding]) -> str:
    """A table of the requests, what went wrong with them, and the incidents."""
    engine = result.engine
    active = [item.name for item in engine.corrections if item.state == "active"]
    off = any(item.state == "off" for item in engine.corrections)
    lines = [
        f"{result.name}: vLLM {engine.vllm_version}, lookup {engine.lookup}, "
        f"corrections: {', '.join(active) or ('off' if off else 'none needed')}",
        *_table(result.requests),
    ]
    said = set()
    for record in result.requests:
        if record.verdict not in _SILENT and record.summary not in said:
            said.add(record.summary)
            lines.append(f"  {record.internal_request_id}: {record.summary}")
            if record.next_step:
                lines.append(f"    next: {record.next_step}")
    for incident in incidents:
        lines.append(f"  {incident.severity} incident {incident.kind}: {incident.summary}")
        lines.append(f"    next: {incident.next_step}")
    return "\n".join(lines) + "\n"


def _table(records: Sequence[RequestRecord]) -> list[str]:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for cells, group in groupby(records, _cells):
        names = [record.internal_request_id for record in group]
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append((name, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def _cells(record: RequestRecord) -> tuple[str, ...]:
    numbers: tuple[Any, ...] = (
        record.prompt_tokens, record.local_tokens, record.served_tokens, record.servable_tokens,
        record.expected_tokens, record.lost_tokens,
    )  # fmt: skip
    return *(f"{number:,}" for number in numbers), record.verdict, record.cause or "-"
