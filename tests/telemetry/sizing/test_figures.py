"""The published conversation trace: figures that anyone can compute by hand."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from kvlens.telemetry.sizing.measure import Question, Sizing, measure
from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.routing import Routing
from kvlens.telemetry.sizing.stack import Order

ROOT = Path(__file__).resolve().parents[3]
PART = ROOT / "tests" / "traces" / "conversation-2000.jsonl.gz"
WHOLE = ROOT.parent / "shared" / "traces" / "conversation.jsonl.gz"
if not WHOLE.exists():  # a worktree lies one folder deeper
    WHOLE = ROOT.parents[1] / "shared" / "traces" / "conversation.jsonl.gz"
SIZES = (100, 1_000, 3_000, 10_000, 30_000)


def sized(path: Path, **question: object) -> Sizing:
    trace = Trace(path)
    return measure(trace, lambda: trace.block_tokens, Question(**question))  # type: ignore[arg-type]


def by_hand(path: Path, size: int, order: Order) -> tuple[float, float]:
    """Blocks and tokens served by an LRU tier of ``size`` blocks that is really kept."""
    tier: OrderedDict[int, None] = OrderedDict()
    hits = asked = hit_tokens = tokens = 0
    for request in Trace(path):
        found = 0
        while found < len(request.ids) and request.ids[found] in tier:
            found += 1
        hits, asked = hits + found, asked + len(request.ids)
        hit_tokens += min(found * 512, request.tokens)
        tokens += request.tokens
        for block in request.ids if order is Order.FIRST_TO_LAST else reversed(request.ids):
            tier[block] = None
            tier.move_to_end(block)
        while len(tier) > size:
            tier.popitem(last=False)
    return hits / asked, hit_tokens / tokens


@pytest.mark.skipif(not WHOLE.exists(), reason="the whole trace is not here")
def test_the_whole_trace() -> None:
    said = sized(WHOLE, sizes=(1_000, 10_000, 30_000, 50_000, 100_000))
    assert (said.requests, said.blocks, said.distinct_blocks) == (12_031, 288_500, 182_790)
    assert 100 * said.ceiling.block_ratio == pytest.approx(36.64, abs=0.02)
    assert 100 * said.ceiling.token_ratio == pytest.approx(37.36, abs=0.02)
    assert [100 * point.block_ratio for point in said.curve] == pytest.approx(
        [4.45, 21.12, 32.57, 35.46, 36.37], abs=0.02
    )


@pytest.mark.parametrize("order", Order)
def test_the_curve_is_that_of_tiers_that_are_really_kept(order: Order) -> None:
    said = sized(PART, sizes=SIZES, order=order)
    assert said.requests == 2_000
    for point in said.curve:
        assert (point.block_ratio, point.token_ratio) == pytest.approx(
            by_hand(PART, point.blocks, order), abs=1e-12
        )


def test_what_reaches_most_of_the_ceiling_is_the_smallest_such_tier() -> None:
    said = sized(PART)
    for share, blocks in said.reach:
        wanted = share * said.ceiling.block_ratio
        assert said.point(blocks).block_ratio >= wanted > said.point(blocks - 1).block_ratio
    assert said.point(said.ceiling.blocks - 1).block_ratio < said.ceiling.block_ratio
    assert said.first_seen + said.ceiling.block_ratio == pytest.approx(1)


def test_the_gpus_own_cache_stands_in_front() -> None:
    plain, said = sized(PART), sized(PART, gpu_tokens=1_000 * 512, sizes=(10, 5_000))
    assert said.gpu == plain.point(1_000)
    assert said.curve[0].block_ratio == said.gpu.block_ratio  # the tier adds nothing yet
    assert said.curve[1] == plain.point(5_000)
    share, blocks = said.reach[0]
    added = said.ceiling.block_ratio - said.gpu.block_ratio
    assert said.point(blocks).block_ratio - said.gpu.block_ratio >= share * added


def test_routing_keeps_prefixes_together_or_does_not() -> None:
    one = sized(PART)
    random, session, prefix = (
        sized(PART, engines=4, routing=routing)
        for routing in (Routing.RANDOM, Routing.SESSION, Routing.PREFIX)
    )
    for said in (random, session, prefix):
        assert (said.blocks, said.distinct_blocks) == (one.blocks, one.distinct_blocks)
        assert said.copies >= said.distinct_blocks
    assert random.ceiling.block_ratio < session.ceiling.block_ratio < prefix.ceiling.block_ratio
    assert prefix.ceiling.block_ratio <= one.ceiling.block_ratio
    again = sized(PART, engines=4, routing=Routing.RANDOM)
    assert again.curve == random.curve
