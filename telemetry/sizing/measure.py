"""One pass over a trace: the curve, and all that is told beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvlens.telemetry.sizing.curve import SHARES, Needs, Point, Reach, Sums, steps
from kvlens.telemetry.sizing.routing import Routing, router
from kvlens.telemetry.sizing.stack import LruStack, Order
from kvlens.telemetry.sizing.trace import TraceRequest

REPORT_EVERY = 1000


@dataclass(frozen=True)
class Question:
    """What is asked of a trace."""

    engines: int = 1
    routing: Routing = Routing.RECORDED
    order: Order = Order.FIRST_TO_LAST
    gpu_tokens: int = 0
    """What the GPU's own cache of each engine holds."""
    sizes: Sequence[int] = ()
    """Tier sizes in blocks; round ones by default."""
    seed: int = 0


@dataclass
class Sizing:
    """What a trace says. Ratios are 0 to 1, of all blocks and of all prompt tokens asked."""

    question: Question
    block_tokens: int
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    distinct_blocks: int = 0
    engines: int = 1
    copies: int = 0
    """Blocks that the engines hold together at the end if nothing is evicted."""
    sums: Sums = field(default_factory=lambda: Sums([0], [0]))

    def point(self, size: int) -> Point:
        """What GPU cache and a tier of ``size`` blocks serve together, each on its engine.

        The tier holds what the GPU cache holds as well, as vLLM's does: it
        stores what was computed, not what the GPU evicts.
        """
        return self._point(size, max(size, self.gpu_blocks))

    def _point(self, name: int, size: int) -> Point:
        return Point(
            name,
            self.sums.blocks(size) / max(1, self.blocks),
            self.sums.tokens(size) / max(1, self.tokens),
        )

    @property
    def gpu_blocks(self) -> int:
        """Blocks that the GPU's own cache holds."""
        return self.question.gpu_tokens // self.block_tokens

    @property
    def gpu(self) -> Point:
        """What the GPU's own cache serves alone."""
        return self._point(self.gpu_blocks, self.gpu_blocks)

    @property
    def ceiling(self) -> Point:
        """What an endless tier serves, and from which size on."""
        return self.point(self.sums.largest)

    @property
    def first_seen(self) -> float:
        """Share of blocks that nobody had asked for before."""
        return self.distinct_blocks / max(1, self.blocks)

    @property
    def curve(self) -> list[Point]:
        """Points in ascending order of size."""
        sizes = self.question.sizes or [
            size for size in steps(self.sums.largest) if size > self.gpu_blocks
        ]
        return [self.point(size) for size in sizes]

    @property
    def reach(self) -> list[Reach]:
        """Sizes at which most of what a tier can add is there."""
        return [Reach(share, self.sums.reach(share, self.gpu_blocks)) for share in SHARES]


def measure(
    requests: Iterable[TraceRequest],
    block_tokens: Callable[[], int],
    question: Question,
    progress: Callable[[int], None] | None = None,
) -> Sizing:
    """Go over ``requests`` once.

    Memory: 24 bytes for each distinct block and some 40 for each request; prefixes that
    have to be chained, several engines and ids that are not dense cost more.

    Args:
        requests: in order of arrival.
        block_tokens: tokens of a block; asked when the first request is there.
        question: what is wanted.
        progress: told the number of requests now and then.
    """
    stacks = [LruStack(question.order) for _ in range(question.engines)]
    everywhere: set[int] | None = None
    said: Sizing | None = None
    for request in requests:
        if said is None:
            said = Sizing(question, block_tokens())
            choose = router(question.routing, said.block_tokens, question.seed).choose
            needs = Needs(said.block_tokens)
        engine = choose(request, stacks)
        while engine >= len(stacks):  # recordings name engines as they come
            stacks.append(LruStack(question.order))
        if everywhere is None and len(stacks) > 1:
            everywhere = set()
        ids = request.ids
        needs.add(stacks[engine].touch(ids), request.tokens)
        said.requests += 1
        said.blocks += len(ids)
        said.tokens += request.tokens
        if progress is not None and said.requests % REPORT_EVERY == 0:
            progress(said.requests)
        if everywhere is not None and question.routing is not Routing.RECORDED:
            everywhere.update(ids)
    if said is None:
        raise ValueError("no request")
    said.engines = len(stacks)
    said.copies = sum(stack.last.blocks for stack in stacks)
    recorded = question.routing is Routing.RECORDED
    said.distinct_blocks = said.copies if recorded or everywhere is None else len(everywhere)
    said.sums = needs.sums()
    return said
