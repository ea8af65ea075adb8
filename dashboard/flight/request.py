"""One request of a recording, in full."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvlens.dashboard.flight import strip as strips
from kvlens.dashboard.flight.terminal import Terminal, safe
from kvlens.dashboard.view import words
from kvlens.dashboard.view.format import clock, duration, plural, size, utc
from kvlens.dashboard.view.strip import build_strip, decisive_lookup
from kvlens.telemetry.flight.reader import Entry
from kvlens.telemetry.records import EngineInfo, GroupChunks, Lookup, RequestRecord

_INDENT = 10


def show(terminal: Terminal, entry: Entry, engine: EngineInfo) -> None:
    """Print a record: verdict, numbers, chunk strip, lookups, stores, loads, evidence."""
    record = entry.record
    _head(terminal, entry)
    terminal.wrapped(
        "engine",
        f"{record.engine_id}, {record.model}, vLLM {engine.vllm_version}, lookup {engine.lookup}",
        _INDENT,
    )
    if (lookup := decisive_lookup(record)) is not None:
        strip = build_strip(record, engine.layout, lookup)
        if strip is not None:
            terminal.line()
            terminal.line(
                terminal.colour(f"CHUNKS at the lookup of {clock(lookup.time)}", "strong")
            )
            strips.draw(terminal, strip)
    _section(terminal, "LOOKUPS", map(_lookup, record.lookups))
    _section(terminal, "STORES", (_store(record, index) for index in range(len(record.stores))))
    _section(terminal, "LOADS", (_load(record, index) for index in range(len(record.loads))))
    evidence = (
        f"{name}: {msgspec.json.encode(value).decode()}" for name, value in record.evidence.items()
    )
    _section(terminal, "EVIDENCE", evidence)
    if record.truncated:
        terminal.line()
        terminal.line("Details of this record were dropped to keep it small.")


def _head(terminal: Terminal, entry: Entry) -> None:
    record = entry.record
    word = words.verdict(record.verdict)
    because = f", {' and '.join(record.causes)} ({record.confidence})" if record.causes else ""
    still = ", still waiting for a deferred lookup" if entry.in_flight else ""
    verdict = terminal.colour(safe(record.verdict), word.tone)
    wait = f", deferred for {duration(record.deferral_seconds)}" * bool(record.deferral_seconds)
    terminal.wrapped("request", record.request_id, _INDENT)
    terminal.wrapped("internal", record.internal_request_id, _INDENT)
    terminal.line(f"{'verdict':<{_INDENT}}{verdict}{safe(because)}{still}")
    for label, text in (
        ("", record.summary or word.help),
        ("next", record.next_step),
        (
            "tokens",
            f"prompt {record.prompt_tokens:,}, local {record.local_tokens:,}, served "
            f"{record.served_tokens:,}, servable {record.servable_tokens:,}, expected "
            f"{record.expected_tokens:,}; lost {record.lost_tokens:,} (at the lookup "
            f"{record.lost_at_lookup:,}, at the store {record.lost_at_store:,})",
        ),
        ("", _sources(record)),
        ("cost", _cost(record)),
        (
            "time",
            f"{utc(record.arrival_time)}, took "
            f"{duration(record.finish_time - record.arrival_time)}{wait}",
        ),
        (
            "output",
            f"{record.output_tokens:,} tokens, ended by {record.finish_reason or 'nothing yet'}"
            + f", {record.preemptions} times preempted" * bool(record.preemptions),
        ),
        ("trace", record.trace_id),
    ):
        if text:
            terminal.wrapped(label, text, _INDENT)


def _sources(record: RequestRecord) -> str:
    """Where the prompt's tokens came from, as far as it is known."""
    parts = []
    if record.computed_tokens is not None:
        parts.append(f"computed {record.computed_tokens:,} of the prompt")
    if record.tier_tokens:
        tiers = ", ".join(f"{name} {tokens:,}" for name, tokens in record.tier_tokens.items())
        parts.append(f"loaded from {tiers}")
    if record.other_tokens:
        parts.append(f"another connector loaded {record.other_tokens:,}")
    if record.evicted_tokens:
        parts.append(f"evicted before {record.evicted_tokens:,}")
    return "; ".join(parts)


def _cost(record: RequestRecord) -> str:
    """What it cost that tokens had to be computed again."""
    parts = []
    if record.lost_gpu_seconds:
        parts.append(f"{duration(record.lost_gpu_seconds)} of device time to compute them again")
    if record.ghost_chunks:
        parts.append(
            f"{plural(record.ghost_chunks, 'chunk')} had been in the tier and evicted, up to "
            f"{record.ghost_distance:,} evictions ago"
        )
    return "; ".join(parts)


def _section(terminal: Terminal, title: str, lines: Iterable[str]) -> None:
    listed = list(lines)
    if listed:
        terminal.line()
        terminal.line(terminal.colour(title, "strong"))
    for line in listed:
        terminal.wrapped("", line, 2)


def _lookup(lookup: Lookup) -> str:
    times = f", {lookup.count:,} times until {clock(lookup.last_time)}" * (lookup.count > 1)
    answer = "deferred" if lookup.result is None else f"answered {lookup.result:,} tokens"
    return (
        f"{clock(lookup.time)} {lookup.exit}: {answer} beyond {lookup.local_tokens:,} local ones "
        f"in {duration(lookup.seconds)}{times}"
    )


def _store(record: RequestRecord, index: int) -> str:
    store = record.stores[index]
    fields = ("offered", "stored", "already", "refused", "excluded", "held_back")
    ended = (
        ""
        if store.completed_at is None
        else f", done after {_since(store.time, store.completed_at)}"
    )
    refused = ", REFUSED" * store.refused + ", FAILED" * store.failed
    evicted = f", evicted {store.evictions:,} chunks" * bool(store.evictions)
    moved = f", {size(store.bytes)}" * (store.bytes is not None)
    return f"{clock(store.time)}{refused} {_groups(store.groups, fields)}{evicted}{moved}{ended}"


def _load(record: RequestRecord, index: int) -> str:
    load = record.loads[index]
    moved = f", {size(load.bytes)}" * (load.bytes is not None)
    ended = f", seen finished after {duration(load.latency)}" * (load.latency is not None)
    failed = ", FAILED" * load.failed
    return f"{clock(load.time)}{failed} {_groups(load.groups, ('loaded',))}{moved}{ended}"


def _since(start: float, end: float) -> str:
    return duration(end - start)


def _groups(groups: Iterable[GroupChunks], fields: Iterable[str]) -> str:
    texts = []
    for group in groups:
        counts = [
            f"{n:,} {name.replace('_', ' ')}" for name in fields if (n := getattr(group, name))
        ]
        texts.append(f"group {group.kv_group} {', '.join(counts) or 'nothing'}")
    return "; ".join(texts) or "no group"
