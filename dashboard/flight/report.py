"""verdicts, incidents and what would have been served, over a recording."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvlens.dashboard.flight.inspect import describe
from kvlens.dashboard.flight.recordings import Recording
from kvlens.dashboard.flight.replay import MODES, STOCK, ReplayedRequest, replay
from kvlens.dashboard.flight.terminal import Terminal, row, safe
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.view import words
from kvlens.dashboard.view.format import plural, utc
from kvlens.telemetry.flight.reader import Entry
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Severity, Verdict

_WIDTHS: Final = (30, -8, -12, -12, -12)


@dataclass
class ServedSums:
    """Requests of one kind, tokens as they were served and as they would have been."""

    requests: int = 0
    served: int = 0
    would: int = 0
    requests_saved: int = 0
    """Requests that would have been served more."""

    def add(self, outcome: ReplayedRequest, mode: str) -> None:
        """Count one request."""
        self.requests += 1
        self.served += outcome.record.served_tokens
        self.would += outcome.would_serve[mode]
        self.requests_saved += outcome.saved(mode) > 0


@dataclass
class ReplayReport:
    """All that is told of the recordings."""

    mode: str
    by_mode: Counter[str] = field(default_factory=Counter)
    served: int = 0
    by_cause: dict[tuple[str, str], ServedSums] = field(
        default_factory=lambda: defaultdict(ServedSums)
    )
    """By verdict and cause."""
    not_replayed: int = 0
    lower_bounds: int = 0
    unsafe_served: int = 0
    """Requests that were served a boundary that cannot be served."""
    unsafe_stock: int = 0
    """Requests that vLLM's own search would have served one."""
    rows: list[dict[str, Any]] | None = None
    """One object per request, for JSON."""
    incidents: list[Incident] = field(default_factory=list)

    def take(self, entry: Entry, engine: EngineInfo) -> None:
        """Replay one record; one that is still in flight is replayed when it ends."""
        if entry.in_flight:
            return
        record = entry.record
        self.unsafe_served += record.verdict == Verdict.UNSAFE
        outcome = replay(record, engine)
        if self.rows is not None:
            self.rows.append(
                {
                    "incarnation_id": record.incarnation_id,
                    "internal_request_id": record.internal_request_id,
                    "finish_time": record.finish_time,
                    "verdict": record.verdict,
                    "cause": record.cause,
                    "served_tokens": record.served_tokens,
                    "would_serve": None if outcome is None else outcome.would_serve,
                    "stock_unsafe": outcome is not None and outcome.unsafe,
                    "lower_bound": outcome is not None and outcome.lower_bound,
                }
            )
        if outcome is None:
            self.not_replayed += 1
            return
        self.lower_bounds += outcome.lower_bound
        self.unsafe_stock += outcome.unsafe
        self.served += record.served_tokens
        self.by_mode.update(outcome.would_serve)
        self.by_cause[record.verdict, record.cause or ""].add(outcome, self.mode)

    @property
    def critical(self) -> bool:
        """Whether something was found that must not wait."""
        found = any(incident.severity == Severity.CRITICAL for incident in self.incidents)
        return found or self.unsafe_served > 0


def as_json(report: ReplayReport, recordings: Sequence[Recording]) -> str:
    """All numbers of a replay, one object per request included."""
    document = {
        "lookup": report.mode,
        "engines": [recording.engine for recording in recordings],
        "served_tokens": report.served,
        "would_serve": {mode: report.by_mode[mode] for mode in MODES},
        "by_cause": [
            {
                "verdict": verdict,
                "cause": cause or None,
                "requests": sums.requests,
                "served_tokens": sums.served,
                "would_serve_tokens": sums.would,
                "requests_saved": sums.requests_saved,
            }
            for (verdict, cause), sums in sorted(report.by_cause.items())
        ],
        "requests": report.rows,
        "not_replayed": report.not_replayed,
        "incidents": report.incidents,
        "notes": [note for recording in recordings for note in recording.notes()],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def show(report: ReplayReport, recordings: Sequence[Recording]) -> None:
    """Print what a replay came to."""
    terminal = Terminal()
    for recording in recordings:
        describe(terminal, recording.engine)
        terminal.line()
    _causes(terminal, report)
    _modes(terminal, report)
    terminal.line()
    for incident in report.incidents:
        _incident(terminal, incident)
    if not report.incidents:
        terminal.line("No incident.")
    for recording in recordings:
        for note in recording.notes():
            print(f"kvlens replay: {safe(note)}", file=sys.stderr)


def _causes(terminal: Terminal, report: ReplayReport) -> None:
    would = f"BY {report.mode.upper()}"
    terminal.line(row(("VERDICT, CAUSE", "REQUESTS", "SERVED", would, "SAVED"), _WIDTHS))
    total = ServedSums()
    for (verdict, cause), sums in sorted(report.by_cause.items(), key=_most_saved):
        name = f"{verdict}, {cause}" if cause else verdict
        tones = {0: words.verdict(verdict).tone}
        terminal.line(row((name, *_numbers(sums)), _WIDTHS, tones, terminal))
        total.requests += sums.requests
        total.served += sums.served
        total.would += sums.would
        total.requests_saved += sums.requests_saved
    terminal.line(row(("all", *_numbers(total)), _WIDTHS))
    terminal.line()
    terminal.line(
        f"{total.requests_saved:,} of {total.requests:,} requests would have been served more by "
        f"the {report.mode} search."
    )


def _most_saved(item: tuple[tuple[str, str], ServedSums]) -> tuple[int, tuple[str, str]]:
    return item[1].served - item[1].would, item[0]


def _numbers(sums: ServedSums) -> tuple[str, ...]:
    saved = sums.would - sums.served
    return f"{sums.requests:,}", f"{sums.served:,}", f"{sums.would:,}", f"{saved:+,}"


def _modes(terminal: Terminal, report: ReplayReport) -> None:
    tokens = ", ".join(f"{mode} {report.by_mode[mode]:,}" for mode in MODES)
    terminal.wrapped("", f"Tokens served: {report.served:,} as it was; by search: {tokens}.", 0)
    for count, text in (
        (report.unsafe_served, "Served an unsafe boundary (the output may be wrong)"),
        (report.unsafe_stock, f"Would get an unsafe boundary from the {STOCK} search"),
        (report.lower_bounds, "With only a part of what was resident on record (lower bounds)"),
        (report.not_replayed, "Not replayed (did not read, or nothing resident is on record)"),
    ):
        if count:
            terminal.wrapped("", f"{text}: {plural(count, 'request')}.", 0)


def _incident(terminal: Terminal, incident: Incident) -> None:
    tone = "bad" if incident.severity == Severity.CRITICAL else "warn"
    closed = (
        f" to {utc(incident.closed_at)} ({incident.close_reason})" if incident.closed_at else ""
    )
    head = f"{incident.severity} {incident.kind} of {safe(incident.engine_id)}"
    terminal.line(terminal.colour(head, tone))
    terminal.line(f"  {utc(incident.opened_at)}{closed}")
    terminal.wrapped("", incident.summary, 2)
    terminal.wrapped("", incident.next_step, 2)
