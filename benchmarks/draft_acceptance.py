"""`make acceptance`: does what the drafter guesses stay as good when its KV is reloaded?

    python benchmarks/draft_acceptance.py [--only NAME,…] [--results FILE]
                                          [--update docs/canary.md]

The drafter has a layer, and so KV, of its own, and guesses right as long as that is
right (dashboard/demo/foreseen.py). Every engine gets the same prompts: first cold, then
again after others have pushed them out of the GPU cache. The control's drafter looks at
no earlier word: what a drafter with useless KV gets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from canary import AFFECTED, NEWEST, python_of
from cases import arguments, run_all, update
from prometheus_client.parser import text_string_to_metric_families
from run import table

from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import Supervisor
from kvlens.dashboard.demo.traffic import Traffic, TrafficClient

BEGIN, END = "<!-- acceptance: begin -->", "<!-- acceptance: end -->"
PLAN = Traffic(documents=16, rounds=3, prompt_tokens=1100, output_tokens=48, vocab=model.TINY.vocab)
CHUNK_TOKENS, GPU_BLOCKS, MAX_MODEL_LEN = 512, 64, 2048
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Case:
    """One row."""

    layers: str
    size: str
    version: str
    lookup: str

    @property
    def name(self) -> str:
        return f"{self.size}-{self.version}-{self.lookup}"


FULL, HYBRID = "full attention", "full attention and sliding windows"
CASES = [
    *(
        Case(layers, size, version, lookup)
        for layers, size in ((FULL, "foreseen-full"), (HYBRID, "foreseen"))
        for version in (AFFECTED, NEWEST)
        for lookup in ("stock", "corrected")
    ),
    Case(f"{HYBRID}; control", "foreseen-forgetful", NEWEST, "corrected"),
]
BY_NAME = {case.name: case for case in CASES}


def counters(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    totals = dict.fromkeys((DRAFTED, ACCEPTED, HITS), 0.0)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return totals


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Play the plan; drafted and accepted tokens of cold and of repeated prompts."""
    options = engine.EngineOptions(
        python=python_of(case.version),
        model=folder / case.size,
        engine_id="acceptance",
        chunk_tokens=CHUNK_TOKENS,
        gpu_blocks=GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        kvlens={"lookup": case.lookup},
    )
    engine.write_model(sys.executable, folder / case.size, case.size)
    with Supervisor() as supervisor:
        server = engine.start(supervisor, options, folder / f"{case.name}.log")
        client = TrafficClient(server.url, engine.MODEL_NAME)
        marks, texts = [counters(server.url)], []
        for answer in client.play(PLAN, case.name):
            texts.append(answer.text)
            if answer.document == PLAN.documents - 1:
                marks.append(counters(server.url))
        client.close()
    row: dict[str, Any] = {
        "reloaded_tokens": round(marks[-1][HITS] - marks[0][HITS]),
        "same_outputs": all(text == texts[n % PLAN.documents] for n, text in enumerate(texts)),
    }
    for part, before, after in (("cold", marks[0], marks[1]), ("repeated", marks[1], marks[-1])):
        drafted, accepted = (after[name] - before[name] for name in (DRAFTED, ACCEPTED))
        row[part] = {"drafted": round(drafted), "accepted": round(accepted)}
    print(f"{case.name}: {row}", flush=True)
    return row


def share(part: dict[str, int]) -> str:
    drafted, accepted = part["drafted"], part["accepted"]
    return f"{accepted / drafted:.1%} ({accepted:,} of {drafted:,})" if drafted else "none drafted"


def rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            case.layers,
            case.version,
            case.lookup,
            f"{row['reloaded_tokens']:,}",
            share(row["cold"]),
            share(row["repeated"]),
            "yes" if row["same_outputs"] else "**no**",
        ]
        for name, case in BY_NAME.items()
        if (row := results.get(name)) is not None
    ]


HEAD = [
    "layers of the target",
    "vLLM",
    "lookup",
    "tokens reloaded",
    "accepted, cold prompts",
    "accepted, repeated prompts",
    "outputs repeat",
]


def main() -> int:
    parser = arguments(BY_NAME)
    options = parser.parse_args()
    _, results = run_all(parser, options, BY_NAME, lambda name, folder: run(BY_NAME[name], folder))
    if options.update is not None:
        update(options.update, BEGIN, END, table(HEAD, rows(results)))
    print(table(HEAD, rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
