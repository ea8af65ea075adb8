"""`make canary`: random conversations with real servers, reloaded KV against recomputed.

    python benchmarks/canary.py [--only NAME,…] [--conversations 200] [--results FILE]
                                [--update docs/canary.md]

One vLLM server after another, each with a random model of another kind, and `kvlens
canary` on it. FILE keeps the results of earlier runs: what is run replaces its row.
Exit code 1 if a row is not ok.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import arguments, run_all, update
from run import BEGIN, END, table

from kvlens.connector import versions
from kvlens.dashboard.canary.examine import CanaryOptions, examine
from kvlens.dashboard.canary.report import text
from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import Supervisor

ROOT = Path(__file__).resolve().parents[1]
NEWEST, AFFECTED = "0.32.0", "0.29.0"
CHUNK_TOKENS, GPU_BLOCKS, MAX_MODEL_LEN = 128, 96, 1536
PROMPT_TOKENS, OUTPUT_TOKENS, TURNS = 600, 8, 4


@dataclass(frozen=True)
class Case:
    """One row: a model on an engine."""

    kind: str
    size: str
    eagle: bool
    version: str = NEWEST
    lookup: str = "corrected"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        parts = (self.size, "eagle" if self.eagle else "plain", self.version, self.lookup)
        return "-".join(parts)


FULL, HYBRID, GDN = "full attention", "full attention and sliding windows", "GDN and full attention"
CASES = [
    Case(FULL, "tiny-full", False),
    Case(FULL, "tiny-full", True),
    Case(HYBRID, "tiny", False),
    Case(HYBRID, "tiny", True),
    Case(GDN, "tiny-recurrent", False, dtype="bfloat16"),
    Case(HYBRID, "tiny", True, version=AFFECTED),
]
BY_NAME = {case.name: case for case in CASES}


def python_of(version: str) -> str:
    folder = next(item.folder for item in versions.SUPPORTED if item.version == version)
    return str(ROOT / folder / "bin" / "python")


def run(case: Case, conversations: int, folder: Path) -> dict[str, Any]:
    """Start the server, talk to it, and return the row."""
    options = engine.EngineOptions(
        python=python_of(case.version),
        model=folder / case.size,
        engine_id="canary",
        chunk_tokens=CHUNK_TOKENS,
        gpu_blocks=GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        kvlens={"lookup": case.lookup},
        speculative=case.eagle,
        dtype=case.dtype,
        # Off by default where layers are recurrent.
        arguments=("--enable-prefix-caching",),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    engine.write_model(sys.executable, folder / case.size, case.size)
    began = time.monotonic()
    with Supervisor() as supervisor:
        server = engine.start(supervisor, options, folder / f"{case.name}.log")
        report = examine(
            CanaryOptions(
                url=server.url,
                conversations=conversations,
                seed=0,
                turns=TURNS,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                vocab=model.SIZES[case.size].vocab,
            ),
            lambda line: print(f"{case.name}: {line}", file=sys.stderr),
        )
    print(f"{case.name}: {text(report)}", flush=True)
    return {**report.as_dict(), "seconds": round(time.monotonic() - began)}


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    found = []
    for name, case in BY_NAME.items():
        if (row := results.get(name)) is None:
            continue
        found.append(
            [
                case.kind,
                case.dtype,
                "EAGLE" if case.eagle else "none",
                case.version,
                case.lookup,
                f"{row['conversations']:,} ({row['reloaded_conversations']:,})",
                f"{row['reloaded_answers']:,} of {row['answers']:,}",
                f"{row['served_tokens']:,}",
                f"{row['rounded_answers']:,}",
                f"{row['unstable_answers']:,}",
                f"{len(row['mismatches']):,}",
                row["status"],
            ]
        )
    return found


HEAD = [
    "layers",
    "precision",
    "speculation",
    "vLLM",
    "lookup",
    "conversations (with reloads)",
    "answers that used reloaded KV",
    "tokens reloaded",
    "rounded",
    "left out",
    "mismatches",
    "result",
]


def main() -> int:
    parser = arguments(BY_NAME)
    parser.add_argument("--conversations", type=int, default=200)
    options = parser.parse_args()
    names, results = run_all(
        parser,
        options,
        BY_NAME,
        lambda name, folder: run(BY_NAME[name], options.conversations, folder),
    )
    if options.update is not None:
        update(options.update, BEGIN, END, table(HEAD, rows(results)))
    print(table(HEAD, rows(results)))
    return int(any(results[name]["status"] != "ok" for name in names))


if __name__ == "__main__":
    sys.exit(main())
