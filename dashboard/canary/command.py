"""``kvlens canary URL``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvlens.dashboard.canary.client import CanaryError, Client
from kvlens.dashboard.canary.plan import FIRST_TOKEN, Plan
from kvlens.dashboard.canary.report import Report, Status, text
from kvlens.dashboard.canary.run import run as play

OK, MISMATCH, USAGE, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130
API_KEY: Final = "VLLM_API_KEY"
MOST_PROMPT_TOKENS: Final = 4096
_CODES: Final = {
    Status.OK: OK,
    Status.MISMATCH: MISMATCH,
    Status.INCONCLUSIVE: INCONCLUSIVE,
}


@dataclass(frozen=True)
class CanaryOptions:
    """Arguments of the command. Sizes are tokens."""

    url: str
    conversations: int
    seed: int
    turns: int
    prompt_tokens: int | None
    """None: as long as the model allows, at most :data:`MOST_PROMPT_TOKENS`."""
    output_tokens: int
    vocab: int
    json_path: Path | None = None


def run(options: CanaryOptions) -> int:
    """Run, print, write what was asked for; returns the exit code."""
    try:
        if options.json_path is not None:
            _require_writable(options.json_path)
        report = examine(options)
        if options.json_path is not None:
            _write(options.json_path, report)
    except CanaryError as error:
        print(f"kvlens canary: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("kvlens canary: ended before it was done", file=sys.stderr)
        return INTERRUPTED
    print(text(report))
    return _CODES[report.status]


def examine(options: CanaryOptions) -> Report:
    """Play the conversations on the server at ``options.url``; raises :class:`CanaryError`."""
    client = Client(options.url, os.environ.get(API_KEY))
    try:
        plan = _plan(options, client.connect())
        return play(client, plan, lambda line: print(f"kvlens canary: {line}", file=sys.stderr))
    finally:
        client.close()


def _plan(options: CanaryOptions, longest: int) -> Plan:
    most = longest - options.output_tokens
    plan = Plan(
        conversations=options.conversations,
        seed=options.seed,
        turns=options.turns,
        prompt_tokens=options.prompt_tokens or min(most, MOST_PROMPT_TOKENS),
        output_tokens=options.output_tokens,
        vocab=options.vocab,
    )
    if plan.prompt_tokens > most:
        raise CanaryError(
            f"--prompt-tokens {plan.prompt_tokens}: this model takes {longest:,} tokens, of which "
            f"{options.output_tokens} are left for the answer: give at most {most}"
        )
    if plan.prompt_tokens < plan.least_prompt:
        raise CanaryError(
            f"--prompt-tokens {plan.prompt_tokens}: {plan.turns} turns with answers of "
            f"{plan.output_tokens} tokens need at least {plan.least_prompt}: give more, or less "
            "--turns or --output-tokens"
        )
    if plan.vocab <= FIRST_TOKEN + 1:
        raise CanaryError(f"--vocab {plan.vocab}: give at least {FIRST_TOKEN + 2}")
    return plan


def _require_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise CanaryError(f"--json {path}: not a file that can be written there")


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CanaryError(f"{path} cannot be written: {error.strerror}") from error
