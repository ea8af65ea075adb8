"""What an arm of the demo gave, what it must show, and the table of both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvlens.dashboard.demo.traffic import TimedAnswer
from kvlens.telemetry.semconv import Cause, IncidentKind


@dataclass(frozen=True)
class Arm:
    """Result of one arm; field names are those of ``kvlens demo --json``."""

    stored_bytes: int
    loaded_bytes: int
    external_queries: int
    external_hits: int
    served_tokens: int
    servable_tokens: int
    reload_seconds: float
    """Median time to the first token of prompts sent before and evicted since."""
    recompute_seconds: float
    """Median time to the first token of prompts never sent before."""
    outputs_identical: bool
    """Every answer is the one that the stock arm gave when the prompt was cold."""
    incidents: list[dict[str, Any]]
    records: int
    """Request records that reached the dashboard."""
    requests: int
    """Requests sent."""


@dataclass(frozen=True)
class DemoCheck:
    """One thing that the demo must show."""

    what: str
    holds: bool
    found: str


def summarise(
    counters: dict[str, int],
    records: Sequence[dict[str, Any]],
    incidents: Sequence[dict[str, Any]],
    answers: Sequence[TimedAnswer],
    reference: dict[int, str],
    requests: int,
) -> Arm:
    """Put one arm's numbers together.

    ``reference`` is the expected text of each document, ``requests`` how many
    were sent, the warm-up included.
    """
    return Arm(
        **counters,
        served_tokens=sum(record["served_tokens"] for record in records),
        servable_tokens=sum(record["servable_tokens"] for record in records),
        reload_seconds=_median(answers, cold=False),
        recompute_seconds=_median(answers, cold=True),
        outputs_identical=all(answer.text == reference[answer.document] for answer in answers),
        incidents=list(incidents),
        records=len(records),
        requests=requests,
    )


def cold_texts(answers: Sequence[TimedAnswer]) -> dict[int, str]:
    """Text of each document's first answer."""
    return {answer.document: answer.text for answer in answers if answer.round == 0}


def _median(answers: Sequence[TimedAnswer], *, cold: bool) -> float:
    return statistics.median(
        answer.first_token_seconds for answer in answers if (answer.round == 0) is cold
    )


def checks(stock: Arm, kvlens: Arm) -> list[DemoCheck]:
    """Everything that must hold for exit code 0, in the order of the story."""
    opened = [one for one in stock.incidents if one["state"] == "open"]
    kinds = ", ".join(f"{one['kind']} ({one['cause']})" for one in opened) or "none"
    zero_hit = [one for one in opened if one["kind"] == IncidentKind.ZERO_HIT]
    right = [
        one
        for one in zero_hit
        if one["cause"] == Cause.DRAFTER_FALLBACK and one["evidence"].get("drafter_groups")
    ]
    return [
        *(_complete(name, arm) for name, arm in (("stock", stock), ("kvlens", kvlens))),
        DemoCheck("stock: KV is stored", stock.stored_bytes > 0, f"{stock.stored_bytes} bytes"),
        DemoCheck(
            "stock: nothing is loaded", stock.loaded_bytes == 0, f"{stock.loaded_bytes} bytes"
        ),
        DemoCheck(
            "stock: 0 tokens served though some could be",
            stock.served_tokens == 0 < stock.servable_tokens,
            f"{stock.served_tokens} of {stock.servable_tokens}",
        ),
        DemoCheck(
            "stock: one open incident, zero_hit by drafter_fallback, naming the drafter groups",
            len(opened) == len(zero_hit) == len(right) == 1,
            kinds,
        ),
        DemoCheck(
            "kvlens: everything that could be served was",
            0 < kvlens.served_tokens == kvlens.servable_tokens,
            f"{kvlens.served_tokens} of {kvlens.servable_tokens}",
        ),
        DemoCheck("kvlens: KV is loaded", kvlens.loaded_bytes > 0, f"{kvlens.loaded_bytes} bytes"),
        DemoCheck(
            "kvlens: no incident",
            not kvlens.incidents,
            ", ".join(one["kind"] for one in kvlens.incidents) or "none",
        ),
        DemoCheck(
            "outputs are identical in both arms",
            stock.outputs_identical and kvlens.outputs_identical,
            f"stock {_yes(stock.outputs_identical)}, kvlens {_yes(kvlens.outputs_identical)}",
        ),
        DemoCheck(
            "kvlens: reloading is faster than recomputing",
            kvlens.reload_seconds < kvlens.recompute_seconds,
            f"{kvlens.reload_seconds:.2f} s against {kvlens.recompute_seconds:.2f} s",
        ),
    ]


def _complete(name: str, arm: Arm) -> DemoCheck:
    return DemoCheck(
        f"{name}: the dashboard has the record of every request",
        arm.records == arm.requests,
        f"{arm.records} of {arm.requests}",
    )


def to_json(vllm_version: str, stock: Arm, kvlens: Arm) -> dict[str, Any]:
    """The document that ``--json`` writes."""
    failed = [check.what for check in checks(stock, kvlens) if not check.holds]
    return {
        "vllm_version": vllm_version,
        "arms": {"stock": asdict(stock), "kvlens": asdict(kvlens)},
        "failed": failed,
    }


def table(vllm_version: str, stock: Arm, kvlens: Arm) -> Table:
    """Both arms side by side."""
    result = Table(title=f"vLLM {vllm_version}, the same traffic", title_justify="left")
    result.add_column("")
    result.add_column("stock", justify="right")
    result.add_column("kvlens", justify="right")
    arms = (stock, kvlens)
    for label, cells in (
        ("bytes stored", [_mib(arm.stored_bytes) for arm in arms]),
        ("bytes loaded", [_mib(arm.loaded_bytes) for arm in arms]),
        ("external queries, tokens", [f"{arm.external_queries:,}" for arm in arms]),
        ("external hits, tokens", [f"{arm.external_hits:,}" for arm in arms]),
        (
            "served of servable tokens",
            [f"{arm.served_tokens:,} of {arm.servable_tokens:,}" for arm in arms],
        ),
        ("first token, cold", [f"{arm.recompute_seconds:.2f} s" for arm in arms]),
        ("first token, repeated", [f"{arm.reload_seconds:.2f} s" for arm in arms]),
        ("outputs identical", [_yes(arm.outputs_identical) for arm in arms]),
        ("incidents", [_incidents(arm) for arm in arms]),
    ):
        result.add_row(label, *cells)
    return result


def _incidents(arm: Arm) -> str:
    return "\n".join(f"{one['kind']}: {one['cause']}" for one in arm.incidents) or "none"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
