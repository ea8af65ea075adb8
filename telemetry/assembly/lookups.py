"""From the fact of a lookup to its record: queries, pops, exit, resident ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.records import GroupLookup, Layout, Lookup, Range
from kvlens.telemetry.semconv import Exit
from kvlens.telemetry.state.residency import Residency, State
from kvlens.telemetry.verdict import search

StateOf = Callable[[int, int], State]
"""``(kv_group, chunk index)`` -> state of that chunk of this request."""


def state_of(layout: Layout, residency: Residency, keys: facts.KeyLists | None) -> StateOf:
    """States of one request's chunks, as they are now; without keys none was ever seen."""
    nothing: tuple[Sequence[bytes], int] = ((), 0)
    lists = {
        group.kv_group: nothing if keys is None else keys[position]
        for position, group in enumerate(layout.groups)
    }

    def state(kv_group: int, chunk: int) -> State:
        names, length = lists[kv_group]
        return residency.state(names[chunk]) if chunk < length else State.NEVER_SEEN

    return state


def signature(fact: facts.LookedUp) -> tuple[object, ...]:
    """Equal for lookups that asked and found the same."""
    found = tuple((width, hits) for _, width, hits, _ in fact.queries)
    return fact.result, fact.local_tokens, fact.num_tokens, fact.in_transfer, found


def found_prefixes(layout: Layout, fact: facts.LookedUp) -> Iterator[tuple[int, Sequence[bytes]]]:
    """``(kv_group, keys)`` that a lookup found of groups which need everything from the start."""
    positions = {group.kv_group: i for i, group in enumerate(layout.groups)}
    for first, _, hits, window in fact.queries:
        if hits and window is None:
            position = positions[facts.group_of(first)]
            group = layout.groups[position]
            start = fact.local_tokens // group.tokens_per_chunk
            yield group.kv_group, fact.keys[position][0][start : start + hits]


def read(
    layout: Layout,
    fact: facts.LookedUp,
    added: facts.Added,
    attempt: int,
    wall: Callable[[int], float],
) -> Lookup:
    """Record of one lookup of the request ``added``, without resident ranges."""
    by_group = layout.by_group()
    local = fact.local_tokens
    asked = [
        (facts.group_of(first), local // by_group[facts.group_of(first)].tokens_per_chunk,
         width, hits)
        for first, width, hits, _ in fact.queries
    ]  # fmt: skip
    cap, load_cap = fact.max_new_tokens, added.max_load_tokens
    replay = search.replay_queries(layout, local, fact.num_tokens, cap, asked, load_cap)
    # A search that is not vLLM's own may ask on where the model of it has ended.
    rest = [search.Answer(query[0], 0, 0, 1) for query in asked[len(replay.answers) :]]
    answers = [*replay.answers, *rest]
    groups = []
    for (kv_group, start, width, hits), answer in zip(asked, answers, strict=True):
        layout_group = by_group[kv_group]
        groups.append(
            GroupLookup(
                kv_group=kv_group,
                group_kind=layout_group.group_kind,
                tokens_per_chunk=layout_group.tokens_per_chunk,
                drafter=layout_group.drafter_used,
                start_chunk=start,
                width=width,
                raw_hits=hits,
                popped=answer.popped,
                boundary=answer.boundary,
                pass_number=answer.pass_number,
            )
        )
    seen = {group.kv_group for group in groups}
    groups += [
        GroupLookup(
            kv_group=group.kv_group,
            group_kind=group.group_kind,
            tokens_per_chunk=group.tokens_per_chunk,
            drafter=group.drafter_used,
            start_chunk=local // group.tokens_per_chunk,
        )
        for group in layout.groups
        if group.kv_group not in seen
    ]
    return Lookup(
        time=wall(fact.time_ns),
        seconds=(fact.end_ns - fact.time_ns) / 1e9,
        local_tokens=local,
        num_tokens=fact.num_tokens,
        attempt=attempt,
        exit=str(_exit(fact, added.skip_reading, replay.exit)),
        result=fact.result,
        groups=groups,
        vetoing_group=replay.vetoing_group if fact.result == 0 else None,
        cap=cap,
        load_cap=load_cap,
    )


def _exit(fact: facts.LookedUp, skipped: bool, replayed: Exit) -> Exit:
    if skipped:
        return Exit.SKIPPED
    if fact.in_transfer and fact.result is None:
        return Exit.DEFERRED_TRANSFER
    if fact.result is None:
        waits = any(hits is None for _, _, hits, _ in fact.queries)
        return Exit.DEFERRED_BACKEND if waits else Exit.DEFERRED_LOADING
    if fact.result:
        return Exit.PARTIAL_TAIL if fact.partial_tail is not None else Exit.SERVED
    # Served nothing although the queries alone would have: something else said no.
    return Exit.MISS if replayed in (Exit.SERVED, Exit.DEFERRED_BACKEND) else replayed


def fill_resident(
    layout: Layout, lookup: Lookup, residency: Residency, keys: facts.KeyLists
) -> None:
    """Add the resident ranges of every group, at most 64 each."""
    ranges: dict[int, tuple[list[Range], bool]] = {}
    for group, (names, length) in zip(layout.groups, keys, strict=True):
        end = min(lookup.num_tokens // group.tokens_per_chunk, length)
        ranges[group.kv_group] = _runs(residency.resident_flags(names[:end]))
    for query in lookup.groups:
        query.resident, query.truncated = ranges[query.kv_group]


def _runs(flags: bytes) -> tuple[list[Range], bool]:
    """Runs of 1, and whether there were too many to list."""
    found: list[Range] = []
    start = flags.find(1)
    while start >= 0:
        if len(found) == semconv.RESIDENT_RANGES_MAX:
            return found, True
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        found.append((start, end - 1))
        start = flags.find(1, end)
    return found, False
