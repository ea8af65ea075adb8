"""What a flight recorder kept, as a table, in full or as JSON lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import msgspec

from kvlens.dashboard.flight import request as requests
from kvlens.dashboard.flight.recordings import Recording, load
from kvlens.dashboard.flight.terminal import CUT, Terminal, row, safe
from kvlens.dashboard.view import words
from kvlens.dashboard.view.format import clock, plural, utc
from kvlens.telemetry import records
from kvlens.telemetry.flight.reader import Entry
from kvlens.telemetry.records import EngineInfo, RequestRecord

_WIDTHS: Final = (8, 0, 9, 20, -7, -7, -7)
_HEADS: Final = ("TIME", "REQUEST", "VERDICT", "CAUSE", "SERVED", "OF", "LOST")
_VERDICT: Final = _HEADS.index("VERDICT")


@dataclass(frozen=True)
class RecordFilter:
    """Which records are shown; empty or None means all."""

    request: str | None = None
    verdicts: Sequence[str] = ()
    causes: Sequence[str] = ()
    since: float | None = None
    until: float | None = None
    """Finish times, Unix seconds, inclusive."""

    def matches(self, record: RequestRecord) -> bool:
        """Whether the record is to be shown."""
        if self.request is not None and not _is(self.request, record):
            return False
        if self.verdicts and record.verdict not in self.verdicts:
            return False
        if self.causes and not set(self.causes).intersection(record.causes, [record.cause]):
            return False
        late = self.since is None or record.finish_time >= self.since
        return late and (self.until is None or record.finish_time <= self.until)


def parse_time(text: str) -> float:
    """Unix seconds of ``1789000000`` or ``2026-09-07T12:00:00`` (UTC); raises ValueError."""
    if text.replace(".", "", 1).isdecimal():
        return float(text)
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _is(given: str, record: RequestRecord) -> bool:
    """Whether ``given`` is one of the record's ids, whole or as the table cuts it."""
    ids = record.request_id, record.internal_request_id
    head, cut, tail = given.partition(CUT)
    return given in ids or bool(
        cut and head and any(one.startswith(head) and one.endswith(tail) for one in ids)
    )


class NoMatchError(ValueError):
    """No record is what was asked for; the message says what to change."""


def show(paths: Sequence[Path], wanted: RecordFilter, as_json: bool) -> None:
    """Print the records that match; raises ``FlightFileError`` and :class:`NoMatchError`."""
    recordings = load(paths)
    if as_json:
        _json(recordings, wanted)
    elif wanted.request:
        _in_full(recordings, wanted)
    else:
        _table(recordings, wanted)


def _json(recordings: Sequence[Recording], wanted: RecordFilter) -> None:
    for recording in recordings:
        for entry in recording:
            if wanted.matches(entry.record):
                fields = msgspec.json.decode(records.encode(entry.record))
                line = {"in_flight": entry.in_flight, **fields}
                print(msgspec.json.encode(line).decode())
        _notes(recording)


def _in_full(recordings: Sequence[Recording], wanted: RecordFilter) -> None:
    terminal = Terminal()
    found = 0
    for recording in recordings:
        for entry in recording:
            if wanted.matches(entry.record):
                if found:
                    terminal.line()
                requests.show(terminal, entry, recording.engine)
                found += 1
        _notes(recording)
    if not found:
        raise NoMatchError(
            f"no request {wanted.request!r} that matches: give the id as the table or --json "
            "shows it"
        )


def _table(recordings: Sequence[Recording], wanted: RecordFilter) -> None:
    terminal = Terminal()
    for index, recording in enumerate(recordings):
        if index:
            terminal.line()
        _show(terminal, recording, wanted)
        _notes(recording)


def _show(terminal: Terminal, recording: Recording, wanted: RecordFilter) -> None:
    describe(terminal, recording.engine)
    widths = list(_WIDTHS)
    widths[1] = terminal.width - sum(map(abs, widths)) - len(widths) + 1
    verdicts: Counter[str] = Counter()
    total, day, first, last, waiting = 0, "", 0.0, 0.0, False
    for entry in recording:
        record = entry.record
        first, last = first or record.finish_time, record.finish_time
        total += 1
        if not wanted.matches(record):
            continue
        if (today := utc(record.finish_time)[:10]) != day:
            day = today
            terminal.line()
            terminal.line(terminal.colour(f"{day} (UTC)", "strong"))
            terminal.line(row(_HEADS, widths))
        tones = {_VERDICT: words.verdict(record.verdict).tone}
        terminal.line(row(_cells(entry), widths, tones, terminal))
        verdicts[record.verdict] += 1
        waiting |= entry.in_flight
    terminal.line()
    if waiting:
        terminal.line("* still waiting for a deferred lookup at that time")
    counted = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    terminal.line(f"{sum(verdicts.values()):,} of {total:,} records{': ' * bool(counted)}{counted}")
    if recording.unremarkable:
        terminal.line(
            f"Left out by the recorder (flight_recorder_mode anomalies): "
            f"{plural(recording.unremarkable, 'unremarkable request')}."
        )
    if total:
        terminal.line(f"from {utc(first)} to {utc(last)}")
        terminal.line(_end(recording))


def _cells(entry: Entry) -> tuple[str, ...]:
    record = entry.record
    return (
        clock(record.finish_time)[:8],
        record.request_id,
        record.verdict + "*" * entry.in_flight,
        record.cause or "",
        f"{record.served_tokens:,}",
        f"{max(record.eligible_tokens, record.served_tokens):,}",
        f"{record.lost_tokens:,}",
    )


def _end(recording: Recording) -> str:
    if recording.stopped_at is not None:
        return f"the engine shut down at {utc(recording.stopped_at)}"
    return "the engine runs still, or ended without a shutdown"


def describe(terminal: Terminal, engine: EngineInfo) -> None:
    """Print what an engine is."""
    active = [item.name for item in engine.corrections if item.state == "active"]
    groups = [f"{g.kv_group} {g.group_kind}/{g.tokens_per_chunk:,}" for g in engine.layout.groups]
    drafters = [str(g.kv_group) for g in engine.layout.groups if g.drafter_used]
    rank = f", rank {engine.dp_rank}" if engine.dp_rank else ""
    for label, text in (
        ("engine", f"{engine.engine_id}{rank} on {engine.host or 'an unnamed host'}"),
        ("model", engine.model),
        ("versions", f"vLLM {engine.vllm_version}, kvlens {engine.kvlens_version}"),
        ("lookup", f"{engine.lookup}; corrections: {', '.join(active) or 'none active'}"),
        ("groups", f"{', '.join(groups)}; drafter groups: {', '.join(drafters) or 'none'}"),
        (
            "capacity",
            "unknown" if engine.capacity_chunks is None else f"{engine.capacity_chunks:,} chunks",
        ),
        ("started", utc(engine.started_at)),
    ):
        terminal.wrapped(label, text, 10)


def _notes(recording: Recording) -> None:
    sys.stdout.flush()
    for note in recording.notes():
        print(f"kvlens inspect: {safe(note)}", file=sys.stderr)
