"""What a sizing says: JSON for programs, a table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvlens.telemetry.sizing.curve import Point
from kvlens.telemetry.sizing.measure import Sizing
from kvlens.telemetry.sizing.memory import GIB, Memory
from kvlens.telemetry.sizing.routing import Routing
from kvlens.telemetry.sizing.stack import Order

IDEAL: Final = (
    "An ideal: it knows neither how long a transfer takes, nor how many run at once, nor what "
    "the tier refuses or loses (docs/sizing.md)."
)
CHAINED: Final = "The trace does not chain its block ids: they were chained here, prefix by prefix."
_BAR: Final = 24


@dataclass(frozen=True)
class Sized:
    """A sizing, where it is from and what a token takes."""

    name: str
    format: str
    chained_here: bool
    notes: tuple[str, ...]
    said: Sizing
    memory: Memory
    seconds: float = 0.0
    now: int | None = None
    """Blocks that the present tier holds."""

    def size(self, blocks: int) -> str:
        """A tier size as one says it: GiB where known, else slots, else blocks."""
        tokens = blocks * self.said.block_tokens
        if (gib := self.memory.gib(tokens)) is not None:
            return gib_text(gib)
        slots = self.memory.chunks(tokens)
        return f"{blocks:,} blocks" if slots is None else f"{slots:,} slots"

    @property
    def per_block(self) -> float:
        """Units of :meth:`size` in a block."""
        size, memory = self.said.block_tokens, self.memory
        if memory.bytes_per_token is not None:
            return memory.bytes_per_token * size / GIB
        return 1.0 if memory.chunks_per_token is None else memory.chunks_per_token * size

    @property
    def unit(self) -> str:
        """What the units are, for an axis without GiB."""
        if self.memory.chunks_per_token is not None:
            return "slots"
        return f"blocks of {self.said.block_tokens} tokens"

    @property
    def column(self) -> str:
        """Head of a column of :meth:`size`; empty where that is blocks."""
        if self.memory.bytes_per_token is not None:
            return "Memory"
        return "Slots" if self.memory.chunks_per_token is not None else ""

    @property
    def how(self) -> str:
        """How the trace was replayed, in one sentence."""
        said = self.said
        order = (
            "in order"
            if said.question.order is Order.FIRST_TO_LAST
            else "from the last to the first, as vLLM does"
        )
        if said.question.routing is not Routing.RECORDED:
            where = f"; {said.engines} engines, {said.question.routing.value} routing"
        else:
            where = f"; {said.engines} engines as recorded" if said.engines > 1 else ""
        return (
            f"LRU; a request's longest prefix is looked up, then its blocks touched {order}{where}"
        )

    @property
    def remarks(self) -> list[str]:
        """What has to be said beside the numbers."""
        return [*([CHAINED] if self.chained_here else []), *self.notes, IDEAL]


def gib_text(gib: float) -> str:
    """GiB with three figures, or TiB."""
    if gib >= 1024:
        return f"{gib / 1024:.3g} TiB"
    return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"


def as_json(sized: Sized) -> dict[str, Any]:
    """The documented object; ratios are 0 to 1, sizes are per engine."""
    said, question = sized.said, sized.said.question
    return {
        "trace": sized.name,
        "format": sized.format,
        "chained_here": sized.chained_here,
        "block_tokens": said.block_tokens,
        "requests": said.requests,
        "blocks": said.blocks,
        "tokens": said.tokens,
        "distinct_blocks": said.distinct_blocks,
        "first_seen": said.first_seen,
        "ceiling": said.ceiling.block_ratio,
        "ceiling_tokens": said.ceiling.token_ratio,
        "ceiling_blocks": said.ceiling.blocks,
        "engines": said.engines,
        "routing": question.routing.value,
        "copies": said.copies,
        "order": question.order.value,
        "bytes_per_token": sized.memory.bytes_per_token,
        "now": None if sized.now is None else _point(sized, said.point(sized.now)),
        "gpu": {"tokens": question.gpu_tokens, **_point(sized, said.gpu)},
        "curve": [_point(sized, point) for point in said.curve],
        "reach": [
            {"share": share, **_point(sized, said.point(blocks))} for share, blocks in said.reach
        ],
        "notes": sized.remarks,
    }


def _point(sized: Sized, point: Point) -> dict[str, Any]:
    tokens = point.blocks * sized.said.block_tokens
    return {
        "blocks": point.blocks,
        "block_ratio": point.block_ratio,
        "token_ratio": point.token_ratio,
        "tier_token_ratio": point.token_ratio - sized.said.gpu.token_ratio,
        "tokens": tokens,
        "chunks": sized.memory.chunks(tokens),
        "gib": sized.memory.gib(tokens),
    }


def as_text(sized: Sized, encoding: str = "utf-8") -> str:
    """What was read, the curve as a table, the sizes that reach most of it."""
    said = sized.said
    lines = [
        f"{sized.name}: {sized.format}, {said.requests:,} requests, {said.tokens:,} prompt tokens",
        f"  {said.blocks:,} blocks of {said.block_tokens} tokens asked, {said.distinct_blocks:,} "
        f"distinct ({said.first_seen:.2%} first seen)",
        f"  {sized.how}",
        "",
        *_table(sized, encoding),
        "",
        f"  an endless tier serves {said.ceiling.block_ratio:.2%} of blocks, "
        f"{said.ceiling.token_ratio:.2%} of tokens",
    ]
    if said.question.gpu_tokens:
        lines.append(
            f"  of these the GPU's own cache ({said.question.gpu_tokens:,} tokens) serves "
            f"{said.gpu.token_ratio:.2%} of tokens alone"
        )
    if said.ceiling.block_ratio > said.gpu.block_ratio:
        lines += [
            f"  {share:.0%} of what a tier can add: {_size(sized, blocks)}"
            for share, blocks in said.reach
        ]
    else:
        lines.append("  a tier can add nothing: nothing comes back that is not there already")
    lines += [f"  {remark}" for remark in sized.remarks]
    return "\n".join(lines) + "\n"


def _size(sized: Sized, blocks: int) -> str:
    tokens = blocks * sized.said.block_tokens
    parts = [f"{blocks:,} blocks", f"{tokens:,} tokens"]
    if (chunks := sized.memory.chunks(tokens)) is not None:
        parts.append(f"{chunks:,} slots")
    if (gib := sized.memory.gib(tokens)) is not None:
        parts.insert(0, gib_text(gib))
    return f"{parts[0]} ({', '.join(parts[1:])})" + (
        " per engine" if sized.said.engines > 1 else ""
    )


def _table(sized: Sized, encoding: str) -> list[str]:
    try:
        "█".encode(encoding)
        mark = "█"
    except (UnicodeError, LookupError):
        mark = "#"
    heads = ["blocks", "of blocks", "of tokens"]
    gib = sized.memory.bytes_per_token is not None
    if gib:
        heads.insert(1, "per engine" if sized.said.engines > 1 else "memory")
    if sized.said.question.gpu_tokens:
        heads.append("tier adds")
    top = sized.said.ceiling.token_ratio or 1.0
    rows = []
    for point in sized.said.curve:
        cells = [f"{point.blocks:,}", f"{point.block_ratio:.2%}", f"{point.token_ratio:.2%}"]
        if gib:
            cells.insert(1, sized.size(point.blocks))
        if sized.said.question.gpu_tokens:
            cells.append(f"{point.token_ratio - sized.said.gpu.token_ratio:.2%}")
        rows.append((cells, mark * round(_BAR * point.token_ratio / top)))
    widths = [
        max(len(row[at]) for row in [heads, *(r for r, _ in rows)]) for at in range(len(heads))
    ]
    return [
        "  "
        + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        + tail
        for cells, tail in [(heads, ""), *((cells, f"  {bar}") for cells, bar in rows)]
    ]
