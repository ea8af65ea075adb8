"""Cost of a lookup: vLLM's own, corrected and exact, side by side on the installed vLLM.

    .venv/bin/python benchmarks/lookup_cost.py [--telemetry]

Every chunk is resident, so that every chunk has to be asked for: the dearest case.
Medians of the scheduler thread's time per lookup, in microseconds, and their ratio
to vLLM's own. The arms take turns, so that the machine's moods hit them alike.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "connector"))

from scheduling import Group, Request, build, store_all

from kvlens.connector import support
from kvlens.connector.observer import Observer

MODES = ("stock", "corrected", "exact")
CHUNKS = (16, 256, 1024, 4096)
CHUNK = 16
LAYOUTS = {
    "full attention": [Group("full_attention", CHUNK)],
    "full + window 128": [
        Group("full_attention", CHUNK),
        Group("sliding_window", CHUNK, window=128),
    ],
    "full + 3 recurrent": [Group("full_attention", CHUNK), *[Group("mamba", CHUNK)] * 3],
    # Blocks of several hashes: the last one is stored in part, too.
    "full + 3 recurrent, tail": [
        Group("full_attention", 4 * CHUNK),
        *[Group("mamba", 4 * CHUNK)] * 3,
    ],
    "full + 3 recurrent x 4": [Group("full_attention", CHUNK), *[Group("mamba", 4 * CHUNK)] * 3],
}


class _Request(Request):
    """A request that hashes its blocks once, as vLLM's does."""

    def __init__(self, tokens: int) -> None:
        super().__init__("request", tokens)
        self._hashes = super().block_hashes

    @property
    def block_hashes(self) -> list[bytes]:
        return self._hashes


def arms(groups: list[Group], chunks: int, telemetry: bool) -> dict[str, tuple[Any, Any]]:
    """Scheduler and request per mode, everything stored."""
    built = {}
    for mode in MODES:
        scheduler = build(
            groups, settings={"lookup": mode}, capacity=8 * max(CHUNKS), block_drop=False
        )
        request = _Request(chunks * groups[0].tokens + groups[0].tokens // 2)
        store_all(scheduler, request)
        if telemetry:
            scheduler.observe(Observer(SimpleNamespace(append=lambda fact: None)))
        built[mode] = scheduler, request
    return built


def medians(built: dict[str, tuple[Any, Any]], rounds: int) -> dict[str, float]:
    """Median time per lookup in microseconds."""
    times: dict[str, list[float]] = {mode: [] for mode in built}
    for _ in range(rounds):
        for mode, (scheduler, request) in built.items():
            start = perf_counter()
            scheduler.get_num_new_matched_tokens(request, 0)
            times[mode].append((perf_counter() - start) * 1e6)
    return {mode: statistics.median(values) for mode, values in times.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="lookups per arm and size")
    parser.add_argument("--telemetry", action="store_true", help="observe the lookups, too")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    observed = "observed" if options.telemetry else "not observed"
    print(f"vLLM {support.vllm_version()}, medians of {options.rounds} lookups, {observed}")
    print(f"{'layout':26}{'chunks':>8}{'stock us':>11}{'corrected us':>22}{'exact us':>20}")
    for name, groups in LAYOUTS.items():
        for chunks in CHUNKS:
            median = medians(arms(groups, chunks, options.telemetry), options.rounds)
            stock = median["stock"]
            ratios = [f"{median[mode]:12.1f} ({median[mode] / stock:.2f})" for mode in MODES[1:]]
            print(f"{name:26}{chunks:8}{stock:11.1f}{ratios[0]:>22}{ratios[1]:>20}")


if __name__ == "__main__":
    main()
