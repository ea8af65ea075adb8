"""A whole examination: as many conversations as fit the server's model, then a report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.canary.client import CanaryError, ServerClient
from kvlens.dashboard.canary.plan import FIRST_TOKEN, Plan
from kvlens.dashboard.canary.report import CanaryReport
from kvlens.dashboard.canary.run import run as play

API_KEY: Final = "VLLM_API_KEY"
MOST_PROMPT_TOKENS: Final = 4096


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


def examine(options: CanaryOptions, tell: Callable[[str], None]) -> CanaryReport:
    """Play the conversations on the server at ``options.url``; raises :class:`CanaryError`.

    ``tell`` hears how far it is.
    """
    client = ServerClient(options.url, os.environ.get(API_KEY))
    try:
        plan = _plan(options, client.connect())
        return play(client, plan, tell)
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
