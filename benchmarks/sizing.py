"""`kvlens size` on generated conversations: time and peak memory as the trace grows.

Usage: .venv/bin/python benchmarks/sizing.py [--requests 10000,100000,1000000] [--json FILE]

Each request is a turn of one of 5,000 open conversations behind one of 50 system prompts of four
blocks; a turn asks for all before it and three blocks more, for ten turns on average. The
trace is written as JSON lines (its time does not count) and read by the command as it is run by
people. `time / (n log n)` has to stay flat.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OPEN, SYSTEMS, TURN, GOES_ON = 5_000, 50, 3, 0.9


def requests(count: int, seed: int = 0) -> Iterator[list[int]]:
    """Block ids of each request, numbered as they come up."""
    draw = random.Random(seed)
    systems = [list(range(4 * index, 4 * index + 4)) for index in range(SYSTEMS)]
    talks = [list(draw.choice(systems)) for _ in range(OPEN)]
    numbered = 4 * SYSTEMS
    for _ in range(count):
        at = draw.randrange(OPEN)
        talks[at] += range(numbered, numbered + TURN)
        numbered += TURN
        yield talks[at]
        if draw.random() > GOES_ON:
            talks[at] = list(draw.choice(systems))


def write(path: Path, count: int) -> int:
    """Write a trace; returns the number of blocks asked."""
    blocks = 0
    with path.open("w", encoding="utf-8") as file:
        for number, ids in enumerate(requests(count)):
            blocks += len(ids)
            listed = ",".join(map(str, ids))
            file.write(
                f'{{"timestamp":{number},"input_length":{512 * len(ids)},"output_length":300,'
                f'"hash_ids":[{listed}]}}\n'
            )
    return blocks


def measured(path: Path) -> tuple[float, float]:
    """Seconds and peak MiB of the command."""
    command = [sys.executable, "-m", "kvlens.dashboard.cli", "size", str(path)]
    began = time.monotonic()
    null = os.open(os.devnull, os.O_WRONLY)
    child = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)]
    )
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"kvlens size failed on {path}")
    wall = time.monotonic() - began
    return min(wall, usage.ru_utime + usage.ru_stime), usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", default="10000,100000,1000000")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'requests':>10}{'blocks':>13}{'CPU s':>9}{'peak MiB':>10}{'us per n log2 n':>17}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        for count in map(int, options.requests.split(",")):
            blocks = write(path, count)
            seconds, peak = measured(path)
            scaled = 1e6 * seconds / (count * math.log2(count))
            rows.append({"requests": count, "blocks": blocks, "seconds": seconds, "peak_mib": peak})
            print(
                f"{count:>10,}{blocks:>13,}{seconds:>9.1f}{peak:>10.0f}{scaled:>17.2f}", flush=True
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
