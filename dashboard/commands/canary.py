"""``kvlens canary``: whether a server answers the same with reloaded KV."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from kvlens.dashboard.commands.arguments import Commands, count, natural
from kvlens.dashboard.commands.exits import (
    CRITICAL,
    INCONCLUSIVE,
    INTERRUPTED,
    OK,
    Refusal,
    complain,
    write,
)


def add(commands: Commands) -> None:
    """Add the command and its arguments."""
    canary = commands.add_parser(
        "canary",
        help="check on a running vLLM server that reloaded KV gives the same answers",
        description="Have random conversations with a vLLM server, push them out of its GPU "
        "cache, ask again, and compare with what it computes anew, token for token "
        "(docs/canary.md). Exit code 0 if nothing differs, 1 on a mismatch, 2 if it cannot run, "
        "3 if nothing was reloaded, so that nothing is shown.",
    )
    canary.add_argument("url", metavar="URL", help="address of the server: http://host:port")
    for name, default, meaning in (
        ("conversations", 20, "how many"),
        ("seed", 0, "the same seed gives the same conversations"),
        ("turns", 4, "of a conversation, at most"),
        ("output-tokens", 16, "of each answer"),
        ("vocab", 500, "prompts are made of token ids below it"),
    ):
        canary.add_argument(
            f"--{name}",
            metavar="N",
            type=count if name != "seed" else natural,
            default=default,
            help=f"{meaning} (default: {default})",
        )
    canary.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=count,
        help="of the longest prompts (default: what the model takes, at most 4096)",
    )
    canary.add_argument("--json", metavar="FILE", type=Path, help="write the report to FILE")
    canary.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Play the conversations, print and write what came of them."""
    from kvlens.dashboard.canary.client import CanaryError
    from kvlens.dashboard.canary.examine import CanaryOptions, examine
    from kvlens.dashboard.canary.report import CanaryStatus, text

    path: Path | None = options.json
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise Refusal(f"--json {path}: not a file that can be written there")
    try:
        report = examine(
            CanaryOptions(
                url=options.url,
                conversations=options.conversations,
                seed=options.seed,
                turns=options.turns,
                prompt_tokens=options.prompt_tokens,
                output_tokens=options.output_tokens,
                vocab=options.vocab,
            ),
            lambda line: complain("canary", line),
        )
    except CanaryError as error:
        raise Refusal(str(error)) from error
    except KeyboardInterrupt:
        complain("canary", "ended before it was done")
        return INTERRUPTED
    if path is not None:
        write("--json", path, json.dumps(report.as_dict(), indent=2) + "\n")
    print(text(report))
    return {
        CanaryStatus.OK: OK,
        CanaryStatus.MISMATCH: CRITICAL,
        CanaryStatus.INCONCLUSIVE: INCONCLUSIVE,
    }[report.status]
