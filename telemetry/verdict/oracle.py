"""The servable boundary, straight from its definition.

A boundary B is a number of tokens counted from the prompt's start. It is
servable when every offloaded group has, as hits, the chunks that attention or
the recurrent state needs to continue from B (design, section 5):

=================  ========================================================
full attention     floor(L/c) ... ceil(B/c) - 1
sliding window W   floor(max(L, B - W + 1 - extra_retained)/c) ... ceil(B/c) - 1
chunked local A    floor(max(L, floor(B/A)*A)/c) ... ceil(B/c) - 1, nothing if A divides B
recurrent          c divides B, and chunk B/c - 1
drafter            in addition chunk ceil(B/c): the one that is popped
=================  ========================================================

L is the local prefix, c the group's tokens per chunk. Chunk k exists in n
tokens when (k + 1) * c <= n; one that does not exist is no hit. Where block
hashes look ahead by h tokens, (k + 1) * c <= n - h, and nothing is popped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlens.telemetry.records import GroupLayout, Layout

Holds = Callable[[int, int], bool]
"""``(kv_group, chunk index)`` -> whether that chunk is a hit."""
HoldsBoundary = Callable[[int, int], bool]
"""``(kv_group, boundary in tokens)`` -> whether a partial block ending there is a hit."""


def limit(layout: Layout, local: int, tokens: int, cap: int | None = None) -> int:
    """Largest boundary that the request allows, whatever is stored.

    Args:
        layout: the groups.
        local: tokens that the GPU cache already covers.
        tokens: all tokens of the request (``request.num_tokens``).
        cap: at most that many tokens beyond ``local``, if limited.
    """
    if not all(group.full_attention for group in layout.groups):
        tokens -= 1  # the last token has to be computed anew, for its logits
    return tokens if cap is None else min(tokens, local + cap)


def required_chunks(group: GroupLayout, local: int, boundary: int) -> range | None:
    """Chunks of one group that ``boundary`` needs, without the one to pop.

    None if no chunk could serve it: a recurrent group has states at the ends
    of its chunks only.
    """
    chunk = group.tokens_per_chunk
    if group.recurrent:
        last, rest = divmod(boundary, chunk)
        return None if rest else range(last - 1, last)
    first = local
    if group.window is not None:
        first = max(local, boundary - group.window + 1 - group.extra_retained)
    elif group.attention_chunk is not None:
        if boundary % group.attention_chunk == 0:
            return range(0)
        first = max(local, boundary - boundary % group.attention_chunk)
    return range(first // chunk, -(-boundary // chunk))


def is_servable(
    layout: Layout, holds: Holds, local: int, tokens: int, boundary: int, cap: int | None = None
) -> bool:
    """Whether ``boundary`` is servable, by definition; arguments as for :func:`limit`."""
    if not local < boundary <= limit(layout, local, tokens, cap):
        return False
    for group in layout.groups:
        needed = required_chunks(group, local, boundary)
        if needed is None:
            return False
        exists = group.chunks(tokens)
        chunks = [*needed, -(-boundary // group.tokens_per_chunk)] if group.pop else needed
        if not all(k < exists and holds(group.kv_group, k) for k in chunks):
            return False
    return True


def servable_boundary(
    layout: Layout,
    holds: Holds,
    local: int,
    tokens: int,
    prompt_tokens: int | None = None,
    cap: int | None = None,
    holds_boundary: HoldsBoundary | None = None,
) -> int:
    """Largest servable boundary in tokens, or ``local`` if there is none.

    Each failure rules out a whole range of boundaries, so that the search
    jumps; it asks ``holds`` at most once per chunk and, for groups other than
    full attention, only as far down as it has to.

    Args:
        layout: the groups; their annotated ``drafter`` flags count.
        holds: which chunks are hits; asked only for chunks that exist.
        local: tokens that the GPU cache already covers.
        tokens: all tokens of the request (``request.num_tokens``).
        prompt_tokens: tokens of its prompt, all of them by default.
        cap: at most that many tokens beyond ``local``, if limited.
        holds_boundary: with ``layout.partial_tail``, which partial last
            blocks are hits; without it only complete chunks count.
    """
    boundary = limit(layout, local, tokens, cap)
    searches = [
        _GroupSearch(group, holds, local, tokens)
        for group in sorted(layout.groups, key=lambda group: group.full_attention, reverse=True)
    ]
    before = None
    while boundary > local and boundary != before:
        before = boundary
        for search in searches:
            boundary = search.bound(boundary) if boundary > local else local
    boundary = max(boundary, local)
    if layout.partial_tail and holds_boundary is not None:
        top = min(limit(layout, local, tokens, cap), (prompt_tokens or tokens) - 1)
        top = min(top, tokens - layout.hash_lookahead)
        for tail in _tails(layout, holds, local, boundary, top):
            if all(holds_boundary(group.kv_group, tail) for group in layout.groups):
                return tail
    return boundary


def whole_boundary(layout: Layout, tokens: int) -> int:
    """Largest boundary that is servable within ``tokens`` if every chunk is there.

    What :func:`servable_boundary` finds then, without asking.
    """
    boundary = limit(layout, 0, tokens)
    for group in layout.groups:
        chunk = group.tokens_per_chunk
        boundary = min(boundary, max(0, group.chunks(tokens) - group.pop) * chunk)
    states = [group.tokens_per_chunk for group in layout.groups if group.recurrent]
    while any(boundary % chunk for chunk in states):
        for chunk in states:
            boundary -= boundary % chunk
    return boundary


class _GroupSearch:
    """One group's view of a descending search; remembers what it asked."""

    def __init__(self, group: GroupLayout, holds: Holds, local: int, tokens: int) -> None:
        self._group = group
        self._ask = holds
        self._local = local
        self._exists = group.chunks(tokens)
        self._known: dict[int, bool] = {}
        self._run = range(0)
        """Chunks known to be hits without a gap, the last ones that were asked for."""
        self._prefix = group.full_attention

    def _holds(self, chunk: int) -> bool:
        if chunk >= self._exists:
            return False
        known = self._known.get(chunk)
        if known is None:
            known = self._known[chunk] = self._ask(self._group.kv_group, chunk)
        return known

    def bound(self, boundary: int) -> int:
        """Largest boundary up to ``boundary`` that one failure does not rule out."""
        group, chunk = self._group, self._group.tokens_per_chunk
        if group.pop and not self._prefix:
            pop = -(-boundary // chunk)
            if not self._holds(pop):
                return (min(pop, self._exists) - 1) * chunk
        needed = required_chunks(group, self._local, boundary)
        if needed is None:
            return boundary - boundary % chunk
        if self._prefix:
            return min(boundary, self._prefix_bound(needed))
        missing = self._last_missing(needed)
        if missing is None:
            return boundary
        lower = min(missing, self._exists) * chunk
        if group.attention_chunk is not None:
            return max(lower, boundary - boundary % group.attention_chunk)
        return lower

    def _prefix_bound(self, needed: range) -> int:
        """Where the unbroken prefix ends, asked for as far as ``needed`` and no further."""
        pop = self._group.pop
        end = max(self._run.stop, needed.start)
        while end < needed.stop + pop and self._holds(end):
            end += 1
        self._run = range(needed.start, end)
        return (end - pop) * self._group.tokens_per_chunk

    def _last_missing(self, needed: range) -> int | None:
        """Highest chunk of ``needed`` that is missing, None if all are hits."""
        run, chunk = self._run, needed.stop - 1
        if chunk in run:
            chunk = run.start - 1
            stop = run.stop
        else:
            stop = needed.stop
        while chunk >= needed.start:
            if not self._holds(chunk):
                self._run = range(0)
                return chunk
            chunk -= 1
        self._run = range(chunk + 1, stop)
        return None


def _tails(layout: Layout, holds: Holds, local: int, boundary: int, top: int) -> Iterator[int]:
    """Boundaries inside a block, above ``boundary``, that the complete chunks reach.

    A partial last block covers a boundary's remainder; below it the groups
    that are not recurrent need their complete chunks up to floor(B/c) - 1.
    """
    step = layout.tokens_per_hash
    for group in layout.groups:
        if group.full_attention:
            chunk = group.tokens_per_chunk
            end = local // chunk
            while (end + 1) * chunk <= top and holds(group.kv_group, end):
                end += 1
            top = min(top, (end + 1) * chunk - 1)
    for tail in range(top - top % step, boundary, -step):
        chunks = (
            (group.kv_group, k)
            for group in layout.groups
            if not group.recurrent and not group.full_attention
            for k in required_chunks(group, local, tail) or ()
            if (k + 1) * group.tokens_per_chunk <= tail
        )
        if all(holds(kv_group, k) for kv_group, k in chunks):
            yield tail
