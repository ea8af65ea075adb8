"""The table of a run, as Markdown."""

from __future__ import annotations

from typing import Any

from dashboard_process import quantile


def markdown(run: dict[str, Any]) -> str:
    """Everything of one run: budgets, queries, ingest, memory, the peer."""
    parts = [
        "# What the dashboard costs",
        f"Measured by `make bench-dashboard RECORDS={run['records']}` ({run['machine']}): a SQLite "
        f"store of {run['records']:,} requests that finished in the last 24 hours "
        f"({run['store_mib']:,} MiB), the real server on one core, everything asked over "
        "HTTP from another. Each query "
        f"ran {run['repeat']} times with drawn arguments, in turns with all others. Processor time "
        "is the server's own; the other times are those of whoever asks, and hold whatever else "
        "the machine did.",
        "## Budgets",
        _table(
            ("budget", "measured", "limit", "kept"),
            [
                (
                    row["name"],
                    _number(row["value"]),
                    f"{'at least' if row['at_least'] else 'at most'} {row['limit']:,}",
                    "yes" if row["kept"] else "**no**",
                )
                for row in run["budgets"]
            ],
        ),
        "## Queries, milliseconds",
        _table(
            ("query", "processor", "first", "p50", "p95", "worst"),
            [
                (
                    row["name"],
                    *(f"{row[key]:.1f}" for key in ("cpu", "first", "p50", "p95", "worst")),
                )
                for row in run["queries"]
            ],
        ),
        "## Ingest, detection, memory",
        _table(("what", "empty store", f"{run['records']:,} records"), _costs(run)),
    ]
    if run["peer"] is not None:
        parts += ["## Beside Arize Phoenix", *_peer(run)]
    return "\n\n".join(parts) + "\n"


def _costs(run: dict[str, Any]) -> list[tuple[str, str, str]]:
    empty, full = run["empty"], run["full"]
    stream = full["to_stream"]
    return [
        (
            "requests stored per second, durable when acknowledged",
            _number(empty["rate"]["per_second"]),
            _number(full["rate"]["per_second"]),
        ),
        (
            "requests per second of processor time",
            _number(empty["rate"]["per_cpu_second"]),
            _number(full["rate"]["per_cpu_second"]),
        ),
        ("resident memory after start, MiB", _number(empty["start_memory"]), ""),
        ("most, after all queries, MiB", "", _number(full["memory_after_queries"])),
        ("most, after ingest too, MiB", _number(empty["memory"]), _number(full["memory"])),
        ("start until it answers, s", "", f"{full['start_seconds']:.1f}"),
        (
            "finish of the third lost request → incident on the stream, ms: p50, worst",
            "",
            f"{quantile(stream, 0.5) * 1e3:.0f}, {max(stream) * 1e3:.0f}",
        ),
    ]


def _peer(run: dict[str, Any]) -> list[str]:
    ours, theirs = run["empty"], run["peer"]
    rate = ours["rate"]
    rows = [
        (
            "requests per second until stored",
            _number(rate["per_second"]),
            _number(theirs["rate"]["per_second"]),
        ),
        (
            "requests per second of processor time",
            _number(rate["per_cpu_second"]),
            _number(theirs["rate"]["per_cpu_second"]),
        ),
        (
            "find one request by its id, ms: p50, p95",
            f"{ours['find_ms']:.1f}, {ours['find_p95_ms']:.1f}",
            f"{theirs['find_ms']:.1f}, {theirs['find_p95_ms']:.1f}",
        ),
        (
            "resident memory after start, MiB",
            _number(ours["start_memory"]),
            _number(theirs["start_memory"]),
        ),
        ("most during the run, MiB", _number(ours["memory"]), _number(theirs["memory"])),
    ]
    return [
        f"The same {rate['requests']:,} requests as {rate['spans']:,} OTLP spans "
        f"({rate['mib']:,.0f} MiB) were sent to both in one run, each on one core with an empty "
        "SQLite store. Phoenix keeps every span and can be asked anything about it; the dashboard "
        "keeps the one record per request and reads its verdict, so that this compares the same "
        "input and the same question, not the same product.",
        _table(("", "kvlens", f"Phoenix {theirs['version']}"), rows),
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
