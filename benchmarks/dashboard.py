"""``make bench-dashboard``: what the dashboard costs, and whether its budgets hold.

A store is filled with RECORDS requests of the last 24 hours, the real server is
started on it, and everything is measured from outside, over HTTP. The same OTLP
bodies go to Arize Phoenix. Prints a table; ``--write`` renews the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("dashboard", "helpers")]

import dashboard_ingest as ingest
import dashboard_peer as peer
import dashboard_queries as queries
from dashboard_fill import fill
from dashboard_process import quantile, started
from dashboard_report import markdown

BYTES_PER_RECORD = 1700
"""Of the filled store, indexes included; for the check of free space."""


def main() -> int:
    """Measure; 0 when all budgets hold, 1 when one does not."""
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kvlens-bench-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        result = _measure(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    text = markdown(result)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.write:
        (ROOT / "docs" / "performance-dashboard.md").write_text(text)
    return 0 if all(row["kept"] for row in result["budgets"]) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000, help="in the store (default 1 M)")
    parser.add_argument("--repeat", type=int, default=60, help="of each query")
    parser.add_argument("--ingest", type=int, default=20_000, help="requests that are sent")
    parser.add_argument("--rounds", type=int, default=20, help="lost requests seen on the stream")
    parser.add_argument("--folder", type=Path, help="keep the store here, use it again")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--write", action="store_true", help="renew docs/performance-dashboard.md")
    parser.add_argument("--no-peer", action="store_true", help="without Arize Phoenix")
    parser.add_argument(
        "--peer", type=Path, default=ROOT / ".build" / "phoenix", help="its environment"
    )
    return parser.parse_args()


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = folder / f"kvlens-{options.records}.db"
    if not path.exists():
        _check_space(folder, options.records)
        began = time.perf_counter()
        fill(path.with_suffix(".part"), options.records)
        path.with_suffix(".part").rename(path)
        _say(f"filled in {time.perf_counter() - began:.0f} s, {path.stat().st_size >> 20:,} MiB")
    machine = _machine()
    exports = ingest.traffic(options.ingest)
    empty = _on_empty_store(folder, exports)
    full = _on_full_store(options, path)
    other = None
    if not options.no_peer:
        found = peer.measure(peer.environment(options.peer), exports, 50)
        other = {**found._asdict(), "rate": found.rate._asdict()}
    latencies = [{**row._asdict(), "kept": row.kept} for row in full.pop("queries")]
    return {
        "records": options.records,
        "store_mib": path.stat().st_size >> 20,
        "repeat": options.repeat,
        "machine": machine,
        "empty": empty,
        "full": full,
        "queries": latencies,
        "peer": other,
        "budgets": [
            _budget("ingest, requests/s on one core", empty["rate"]["per_cpu_second"], 5000, True),
            _budget("slowest query, p95 ms", max(row["p95"] for row in latencies), 200, False),
            _budget("third lost request → stream, s, worst", max(full["to_stream"]), 2, False),
        ],
    }


def _on_empty_store(folder: Path, exports: ingest.Exports) -> dict[str, Any]:
    _say("ingest into an empty store")
    path = folder / "empty.db"
    for leftover in folder.glob("empty.db*"):
        leftover.unlink()
    with started(*_server(path)) as server:
        idle = server.memory_mib()
        rate = ingest.rate(server, exports, 0)
        taken = []
        for ident in ingest.ids_of(exports, 50):
            began = time.perf_counter()
            ingest.httpx.get(f"{server.url}/api/v1/requests/{ident}").raise_for_status()
            taken.append((time.perf_counter() - began) * 1e3)
        return {
            "rate": rate._asdict(),
            "find_ms": quantile(taken, 0.5),
            "find_p95_ms": quantile(taken, 0.95),
            "start_memory": idle,
            "memory": server.memory_mib("VmHWM"),
        }


def _on_full_store(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    command, url, ready = _server(path)
    began = time.perf_counter()
    with started(command, url, ready) as server:
        start = time.perf_counter() - began
        _say(f"queries on {options.records:,} records")
        latencies = queries.measure(server, path, options.repeat)
        after_queries = server.memory_mib("VmHWM")
        _say("from the third lost request to the stream")
        quiet = ingest.to_stream(server.url, options.rounds)
        _say("ingest into the full store")
        more = ingest.traffic(options.ingest, first=time.time_ns() // 1000 % 10**9 * 10**6)
        rate = ingest.rate(server, more, ingest.records(server.url))
        return {
            "start_seconds": start,
            "queries": latencies,
            "to_stream": quiet,
            "rate": rate._asdict(),
            "memory_after_queries": after_queries,
            "memory": server.memory_mib("VmHWM"),
        }


def _server(path: Path) -> tuple[list[str], str, str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    arguments = ["serve", "--store", str(path), "--port", str(port)]
    command = [sys.executable, "-m", "kvlens.dashboard.cli", *arguments]
    return command, f"http://127.0.0.1:{port}", "/readyz"


def _budget(name: str, value: float, limit: float, at_least: bool) -> dict[str, Any]:
    kept = value >= limit if at_least else value <= limit
    return {"name": name, "value": value, "limit": limit, "at_least": at_least, "kept": kept}


def _machine() -> str:
    return (
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before, "
        f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
        f"{platform.system()} {platform.machine()}"
    )


def _check_space(folder: Path, records: int) -> None:
    need, free = records * BYTES_PER_RECORD * 3 // 2, shutil.disk_usage(folder).free
    if need > free:
        sys.exit(
            f"{folder} has {free >> 30} GiB free, {records:,} records need about {need >> 30} GiB: "
            "name another --folder or fewer --records"
        )


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
