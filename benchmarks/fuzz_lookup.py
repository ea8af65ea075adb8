"""Lookups on random layouts against the oracle, on every engine that is installed.

    make fuzz EXAMPLES=50000

Each engine is run by its own interpreter. Exit status 1 if ``exact`` ever differs
from the oracle, or ``exact`` or ``corrected`` ever serve what is not safe.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
BATCH = 250
EXAMPLES_SHOWN = 3
STOCK_KINDS = {
    "agrees": "agrees",
    "zero": "zero where a boundary exists",
    "lower": "lower",
    "unsafe": "unsafe",
    "higher": "higher",
}


def engines() -> dict[str, Path]:
    """Version to interpreter of every engine that the checkout has laid out."""
    sys.path.insert(0, str(ROOT / "connector"))
    from versions import SUPPORTED

    found = {}
    for engine in SUPPORTED:
        python = ROOT / engine.folder / "bin" / "python"
        if python.exists():
            found[engine.version] = python
    return found


def check(seeds: range) -> tuple[Counter[str], list[str]]:
    """Outcomes of a batch of examples, and a few of those that went wrong."""
    logging.disable(logging.WARNING)
    import brute_force
    from lookup_cases import make_case

    counts: Counter[str] = Counter()
    shown: list[str] = []
    for seed in seeds:
        case = make_case(Random(seed))
        counts["examples"] += 1
        for problem in brute_force.problems(case):
            mode, _, text = problem.partition(": ")
            counts[f"{mode} {text.partition(',')[0]}"] += 1
            shown.append(f"seed {seed}: {problem}\n    {case}")
        if not case.settled:
            continue
        counts["settled"] += 1
        counts["servable"] += brute_force.expected(case) != 0
        counts[f"stock {brute_force.stock_kind(case)}"] += 1
        counts["stock ends the engine"] += brute_force.ends_engine(case)
    return counts, shown[:EXAMPLES_SHOWN]


def run_engine(examples: int, seed: int) -> dict[str, object]:
    """Fuzz the engine of this interpreter."""
    sys.path.insert(0, str(ROOT / "tests" / "connector"))
    import brute_force
    from lookup_cases import make_case

    from kvlens.connector import exact_lookup, support

    # Under pytest a failed invariant is an error; so it is here.
    exact_lookup.raise_errors = lambda: True
    brute_force.problems(make_case(Random(seed)))  # classes are made once, then forked
    base = seed * 10**9
    batches = [
        range(base + start, base + min(start + BATCH, examples))
        for start in range(0, examples, BATCH)
    ]
    counts: Counter[str] = Counter()
    shown: list[str] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for part, wrong in pool.map(check, batches):
            counts += part
            shown += wrong
    return {"version": support.vllm_version(), "counts": counts, "shown": shown[:EXAMPLES_SHOWN]}


def report(result: dict[str, object]) -> bool:
    """Print what came out for one engine; True if nothing went wrong."""
    counts: Counter[str] = Counter(result["counts"])  # type: ignore[call-overload]
    wrong = {k: n for k, n in counts.items() if k.startswith(("exact ", "corrected "))}
    settled = counts["settled"]
    print(f"vLLM {result['version']}: {counts['examples']} examples")
    print(
        f"  exact      {counts['exact mismatch']} mismatches with the oracle, "
        f"{counts['exact unsafe']} unsafe, {counts['exact asked twice']} keys asked twice, "
        f"{counts['exact load']} loads of what was not found"
    )
    print(
        f"  corrected  {counts['corrected above the oracle']} above the oracle, "
        f"{counts['corrected unsafe']} unsafe, "
        f"{counts['corrected load']} loads of what was not found"
    )
    kinds = ", ".join(f"{counts[f'stock {kind}']} {text}" for kind, text in STOCK_KINDS.items())
    print(
        f"  stock      of {settled} without deferrals, {counts['servable']} of them servable: "
        f"{kinds}; {counts['stock ends the engine']} would end the engine"
    )
    for text in result["shown"]:  # type: ignore[attr-defined]
        print(f"  WRONG {text}")
    for kind, number in wrong.items():
        print(f"  WRONG {kind}: {number}")
    return not wrong


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=50_000, help="per engine")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other examples")
    parser.add_argument("--this-engine", action="store_true", help="only this interpreter's")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    arguments = ["--examples", str(options.examples), "--seed", str(options.seed)]
    if options.this_engine:
        result = run_engine(options.examples, options.seed)
        if options.json:
            print(json.dumps(result))
            return 0
        return 0 if report(result) else 1
    found = engines()
    if not found:
        print("no engine is installed here: run make setup first", file=sys.stderr)
        return 2
    right = True
    for version, python in found.items():
        command = [str(python), __file__, "--this-engine", "--json", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"vLLM {version}: the fuzz ended with status {done.returncode}", file=sys.stderr)
            right = False
            continue
        right = report(json.loads(done.stdout.splitlines()[-1])) and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
