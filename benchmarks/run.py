"""`make bench`: what kvlens costs, as a table, against the budgets.

    python benchmarks/run.py [--only lookup,drain,throughput] [--json FILE]
                             [--update docs/performance.md]

All arms run in this one run on this one machine: ratios and differences count,
absolute times are those of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
PARTS = ("lookup", "drain", "throughput")
LEAST_RATIO, MOST_MEGABYTES = 0.99, 200


def verdict(holds: bool) -> str:
    return "holds" if holds else "**missed**"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def lookup_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        added, most = row["added_us"], row["budget_us"]
        holds = max(added["on"], added["on, all spans"]) <= most and added["off"] <= row["off_us"]
        cells.append(
            [
                row["layout"],
                f"{row['chunks']:,}",
                f"{row['stock_us']:,.1f}",
                f"{added['off']:+.2f}",
                f"{added['interface']:+.2f}",
                f"{added['on']:+.2f}",
                f"{added['on, all spans']:+.2f}",
                f"{1 + added['on, all spans'] / row['stock_us']:.2f}",
                f"{row['off_us']:.1f} / {most:.1f}",
                verdict(holds),
            ]
        )
    head = [
        "layout",
        "chunks",
        "stock, µs",
        "off",
        "interface",
        "on",
        "on, all spans",
        "all spans / stock",
        "may add (off / on)",
        "budget",
    ]
    return "Added to one lookup on the scheduler thread, µs:\n\n" + table(head, cells)


def drain_table(found: dict[str, Any]) -> str:
    drain, memory = found["drain"], found["memory"]
    cells = [
        ["facts through the drain thread", f"{drain['facts_per_second']:,.0f} per second", ""],
        [
            "CPU time of the drain thread per request of 4,097 tokens in three groups",
            f"{drain['cpu_us_per_request']:,.0f} µs",
            "",
        ],
        [
            f"memory at {memory['resident_chunks']:,} resident chunks",
            f"{memory['megabytes']:.0f} MB",
            verdict(memory["megabytes"] <= MOST_MEGABYTES),
        ],
        *(
            [
                f"GIL at {row['requests_per_second']:g} such requests per second",
                f"{row['share']:.1%} of one core; units of 20 µs of the scheduler: p99 "
                f"{row['p99_us_alone']:.0f} µs alone, {row['p99_us_beside']:.0f} µs beside it",
                "",
            ]
            for row in found["gil"]
        ),
    ]
    return table(["what", "measured", "budget"], cells)


def throughput_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["model"],
            str(row["at_a_time"]),
            f"{row['stock_tokens_per_second']:,.0f}",
            f"{row['ratio']:.3f} ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})",
            f"{row['control_ratio']:.3f}",
            f"{row['cpu_ratio']:.3f}",
            f"{row['control_cpu_ratio']:.3f}",
            throughput_verdict(row),
        ]
        for row in rows
    ]
    head = [
        "model",
        "at a time",
        "stock, tokens/s",
        "kvlens / stock (quartiles)",
        "stock / stock",
        "CPU time, kvlens / stock",
        "stock / stock",
        "budget 0.99",
    ]
    return "Throughput of real servers, prompt and output tokens:\n\n" + table(head, cells)


def throughput_verdict(row: dict[str, Any]) -> str:
    """A ratio that is no further from 1 than that of stock to itself tells nothing."""
    if row["ratio"] >= LEAST_RATIO:
        return "holds"
    noise = abs(1 - row["control_ratio"])
    return "not told apart from stock" if 1 - row["ratio"] <= noise else verdict(False)


def measure(parts: list[str]) -> dict[str, Any]:
    """Run the parts; each module is imported only if it is needed."""
    found: dict[str, Any] = {}
    for part in parts:
        print(f"bench: {part} …", file=sys.stderr, flush=True)
        if part == "lookup":
            import lookup_overhead

            found[part] = lookup_overhead.run()
        elif part == "drain":
            import drain

            found[part] = drain.run()
        else:
            import throughput

            found[part] = throughput.run()
    return found


def markdown(found: dict[str, Any]) -> str:
    writers = {"lookup": lookup_table, "drain": drain_table, "throughput": throughput_table}
    about = (
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[1]:.1f} (5 minutes)."
    )
    return "\n".join([about + "\n", *(writers[part](rows) for part, rows in found.items())])


def update(path: Path, text: str) -> None:
    """Replace the table between the marks in a document."""
    document = path.read_text(encoding="utf-8")
    head, _, rest = document.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path} has no marks {BEGIN} and {END} to put the table between")
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main() -> int:
    """Measure, print, and write what was asked for; 0 even if a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--update", type=Path, help="put the table into this document")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    found = measure(parts)
    text = markdown(found)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.update:
        update(options.update, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
