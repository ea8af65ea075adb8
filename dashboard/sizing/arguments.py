"""Arguments of ``kvlens size``; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.telemetry.sizing.routing import Routing
from kvlens.telemetry.sizing.stack import Order

if TYPE_CHECKING:
    from kvlens.telemetry.sizing.memory import Memory

USAGE = 2
_MOST = 10**15


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    size = commands.add_parser(
        "size",
        help="what an offload tier of each size would serve of a trace of requests",
        description="Read a trace of requests once (docs/sizing.md) and tell what an LRU tier of "
        "every size would serve of it. Exit code 2 if the trace cannot be used.",
    )
    size.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="trace in the format of Mooncake or Qwen-Bailian, flight recording or export of the "
        "dashboard; plain, gzip or zstd",
    )
    size.add_argument("--json", metavar="OUT", type=Path, help="write all numbers to OUT")
    size.add_argument("--html", metavar="OUT", type=Path, help="write the curve's picture to OUT")
    size.add_argument(
        "--blocks", metavar="N,N,...", type=_sizes, default=(), help="tier sizes, in trace blocks"
    )
    size.add_argument(
        "--block-tokens",
        metavar="N",
        type=whole,
        help="tokens of a trace block (default: 512 for mooncake, 16 for qwen-bailian)",
    )
    size.add_argument(
        "--gpu-tokens",
        metavar="N",
        type=whole,
        default=0,
        help="tokens that the GPU's own cache of each engine holds (default: none)",
    )
    memory = size.add_mutually_exclusive_group()
    memory.add_argument(
        "--bytes-per-token",
        metavar="N",
        type=positive,
        help="of KV data over all layers and devices: sizes are told in GiB",
    )
    memory.add_argument(
        "--layout",
        metavar="FILE",
        type=Path,
        help="YAML file with the layout of a scenario (docs/scenarios.md): sizes are told in slots "
        "of vLLM's tier and, where groups have bytes_per_block, in GiB",
    )
    size.add_argument("--engines", metavar="N", type=whole, help="that share the trace")
    size.add_argument(
        "--routing",
        choices=[one.value for one in Routing if one is not Routing.RECORDED],
        help="how requests are spread over engines (default: random)",
    )
    size.add_argument("--seed", metavar="N", type=int, default=0, help="of draws (default: 0)")
    size.add_argument(
        "--order",
        choices=[one.value for one in Order],
        default=Order.FIRST_TO_LAST.value,
        help="in which a request touches its blocks (default: %(default)s; vLLM: last-to-first)",
    )
    size.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvlens.dashboard.sizing import command
    from kvlens.telemetry.sizing.measure import Question
    from kvlens.telemetry.sizing.memory import Memory

    try:
        memory = Memory(options.bytes_per_token)
        if options.layout is not None:
            memory = _of_layout(options.layout)
    except ValueError as error:
        print(f"kvlens size: {error}", file=sys.stderr)
        return USAGE
    spread = options.engines is not None or options.routing is not None
    question = Question(
        engines=options.engines or 1,
        routing=Routing(options.routing or Routing.RANDOM) if spread else Routing.RECORDED,
        order=Order(options.order),
        gpu_tokens=options.gpu_tokens,
        sizes=options.blocks,
        seed=options.seed,
    )
    return command.run(
        options.file, options.block_tokens, question, memory, options.json, options.html
    )


def _of_layout(path: Path) -> Memory:
    """What a token takes with that layout; raises :class:`ValueError`."""
    from kvlens.connector.simulation.reading import read_layout
    from kvlens.telemetry.sizing.memory import Memory

    layout = read_layout(path)
    per_block = [group.bytes_per_block for group in layout.groups]
    if any(per_block) and not all(per_block):
        raise ValueError(
            f"{path}: layout.groups: bytes_per_block is given for some groups; allowed: for all or "
            f"for none"
        )
    return Memory(
        bytes_per_token=sum(
            (group.bytes_per_block or 0) / group.tokens_per_block for group in layout.groups
        )
        or None,
        chunks_per_token=sum(
            1 / (group.tokens_per_block * layout.blocks_per_chunk) for group in layout.groups
        ),
    )


def whole(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {_MOST:,}")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({whole(one.strip().replace("_", "")) for one in text.split(",")}))
