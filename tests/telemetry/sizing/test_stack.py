"""Stack distances against the stack itself, kept as a list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlens.telemetry.sizing.fenwick import Fenwick
from kvlens.telemetry.sizing.stack import LruStack, Order

SPARSE = 10**15
ids = st.lists(st.integers(0, 9) | st.integers(SPARSE, SPARSE + 2), max_size=9)


@st.composite
def chained(draw: st.DrawFn) -> list[list[int]]:
    """Requests whose equal ids mean equal prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = draw(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=30))
    return [
        [numbers.setdefault(tuple(request[: end + 1]), len(numbers)) for end in range(len(request))]
        for request in requests
    ]


def by_hand(requests: list[list[int]], order: Order) -> list[list[int]]:
    """Per request, the tier that each found block of its prefix needs."""
    stack: list[int] = []
    needs = []
    for request in requests:
        need, found = 0, []
        for block in request:
            if block not in stack:
                break
            need = max(need, len(stack) - stack.index(block))
            found.append(need)
        needs.append(found)
        for block in request if order is Order.FIRST_TO_LAST else reversed(request):
            if block in stack:
                stack.remove(block)
            stack.append(block)
    return needs


def measured(requests: list[list[int]], order: Order) -> list[list[int]]:
    stack, needs = LruStack(order), []
    for request in requests:
        found: list[int] = []
        for run in stack.touch(request):
            assert run.start == len(found)
            found += [run.need + run.step * more for more in range(run.end - run.start)]
        needs.append(found)
    assert stack.last.blocks == len({block for request in requests for block in request})
    return needs


@given(st.lists(ids, max_size=30), st.sampled_from(Order))
def test_any_requests_repeated_and_unchained_blocks_included(
    requests: list[list[int]], order: Order
) -> None:
    assert measured(requests, order) == by_hand(requests, order)


@given(chained(), st.sampled_from(Order))
def test_chained_requests(requests: list[list[int]], order: Order) -> None:
    assert measured(requests, order) == by_hand(requests, order)


def test_the_two_orders_differ_where_a_prompts_start_is_evicted_first() -> None:
    requests = [[0, 1, 2], [0, 1, 2]]
    assert measured(requests, Order.FIRST_TO_LAST) == [[], [3, 3, 3]]
    assert measured(requests, Order.LAST_TO_FIRST) == [[], [1, 2, 3]]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(-9, 9)), max_size=60))
def test_sums_behind_an_element(changes: list[tuple[bool, int, int]]) -> None:
    tree, values = Fenwick(), [0]
    tree.append(0)
    for appended, at, value in changes:
        if appended:
            tree.append(value)
            values.append(value)
        else:
            tree.add(at % len(values), value)
            values[at % len(values)] += value
    assert [tree.after(at) for at in range(len(values))] == [
        sum(values[at + 1 :]) for at in range(len(values))
    ]
    assert tree.total == sum(values)
