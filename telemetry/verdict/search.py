"""A model of vLLM's own search for the boundary (``_lookup_complete_chunks``).

It replays what an engine asked (:func:`replay_queries`) and says what a search
with other flags would have found (:func:`search`): that is how a verdict knows
which change would have changed the result. Tests hold it against the class of
the vLLM that is installed.

The search goes through full-attention groups first, then windowed ones, each
time lowering the boundary; a drafter group loses its last chunk ("pop"); a
lowered boundary may need another pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import Exit
from kvlens.telemetry.verdict.oracle import Holds

Asked = tuple[int, int, int, "int | None"]
"""``(kv_group, start chunk, width in chunks, raw hits or None if deferred)``."""


@dataclass(frozen=True)
class Answer:
    """What one query of one group came to."""

    kv_group: int
    popped: int
    """Chunks popped: 1 for a drafter group that still had to, else 0."""
    boundary: int
    """Boundary in tokens after this query; 0 if it ended the search with nothing."""
    pass_number: int
    """From 1."""


@dataclass(frozen=True)
class Replay:
    """A lookup as the engine went through it."""

    answers: list[Answer]
    exit: Exit
    vetoing_group: int | None
    """The group whose hits or pop left nothing to load; None if there is none."""
    boundary: int
    """Boundary in tokens at the end; the local one if nothing was found."""


@dataclass
class _Walk:
    """State of one search, shared by replay and prediction."""

    layout: Layout
    local: int
    tokens: int
    cap: int | None
    load_cap: int | None
    drafters: Collection[int]
    load_window: bool = True
    groups: list[GroupLayout] = field(init=False)
    bound: int = field(init=False)
    unpopped: int = field(init=False)
    """What the boundary would be had nothing been popped."""
    hit: int = 0
    deferred: bool = False
    again: str = "all"
    """Groups of the next pass: ``all``, ``windowed`` or none (empty)."""
    verified: set[int] = field(default_factory=set)
    windowed_seen: bool = False

    def __post_init__(self) -> None:
        windowed = [group for group in self.layout.groups if not group.full_attention]
        windowed.sort(key=lambda group: _window_chunks(group, self.load_window), reverse=True)
        self.groups = [*(g for g in self.layout.groups if g.full_attention), *windowed]
        spared = int(bool(windowed))  # the last token is computed anew
        self.bound = self.tokens - spared
        for cap in (self.cap, self.load_cap):
            if cap is not None:
                lowered = spared if self.layout.cap_spares_token else 0
                self.bound = min(self.bound, self.local + cap - lowered)
        if windowed:
            for group in (g for g in windowed if g.recurrent):
                self.bound -= self.bound % group.tokens_per_chunk
        self.unpopped = self.bound

    def passes(self) -> Iterator[list[GroupLayout]]:
        """Groups of each pass, until the boundary stands."""
        while self.again:
            windowed_only = self.again == "windowed"
            self.again, self.windowed_seen = "", False
            yield [g for g in self.groups if not (windowed_only and g.full_attention)]

    def pops(self, group: GroupLayout) -> bool:
        return group.kv_group in self.drafters and group.kv_group not in self.verified

    def open(self, group: GroupLayout) -> bool:
        """Fit the boundary to this group's chunks; False if less than one is left."""
        chunk = group.tokens_per_chunk
        keyed = group.chunks(self.tokens) * chunk
        self.bound = min(self.bound, keyed)
        self.unpopped = min(self.unpopped, keyed)
        if self.load_cap is not None:
            self.bound -= self.bound % chunk
        return self.bound - self.local >= chunk

    def close(self, group: GroupLayout, start: int, hits: int | None) -> bool:
        """Take in one answer that is not 0; False if less than a chunk is left."""
        chunk = group.tokens_per_chunk
        if hits is None:
            self.deferred = True
        else:
            self.unpopped = min(self.unpopped, chunk * (start + hits))
            if self.pops(group):
                hits -= 1
                self.verified.add(group.kv_group)
            self.bound = min(self.bound, chunk * (start + hits))
        hit = self.bound - self.local
        if hit < chunk:
            return False
        if hit < self.hit:
            if group.kv_group not in self.drafters:
                self.verified.clear()
            if self.deferred:
                self.deferred, self.again = False, "all"
            elif self.windowed_seen and not self.again:
                self.again = "windowed"
        self.windowed_seen |= not group.full_attention
        self.hit = hit
        return True


def search(
    layout: Layout,
    holds: Holds,
    local: int,
    tokens: int,
    cap: int | None = None,
    *,
    drafters: Collection[int],
    widen: bool = True,
    load_window: bool = True,
    load_cap: int | None = None,
) -> int:
    """Boundary in tokens that vLLM's search returns; ``local`` if it finds nothing.

    Args:
        layout: the groups; their drafter flags are not read.
        holds: which chunks are hits; asked only for chunks that exist.
        local: tokens that the GPU cache already covers.
        tokens: all tokens of the request (``request.num_tokens``).
        cap: ``max_num_new_tokens``, if limited.
        drafters: ``kv_group`` of those whose last chunk is popped.
        widen: whether full-attention drafter groups too ask for one chunk more
            (0.30 and newer).
        load_window: whether windows reach as far as allocation does (0.30 and newer).
        load_cap: ``max_load_tokens``, if limited.
    """
    walk = _Walk(layout, local, tokens, cap, load_cap, drafters, load_window)
    for groups in walk.passes():
        for group in groups:
            if not walk.open(group):
                return local
            start, hits = local // group.tokens_per_chunk, 0
            stop = _query_stop(walk, group, widen)
            if group.full_attention:
                while start + hits < stop and holds(group.kv_group, start + hits):
                    hits += 1
            else:
                hits = _window_hits(walk, group, holds, range(start, stop))
            if hits == 0 or not walk.close(group, start, hits):
                return local
    return local + walk.hit


def replay_queries(
    layout: Layout,
    local: int,
    num_tokens: int,
    cap: int | None,
    queries: Sequence[Asked],
    load_cap: int | None = None,
) -> Replay:
    """Follow a lookup through the queries that it really made.

    Args:
        layout: the groups, with the ``drafter_used`` flags of that engine.
        local: tokens that the GPU cache covered.
        num_tokens: all tokens of the request then.
        cap: ``max_num_new_tokens``, if limited.
        queries: what was asked, in order.
        load_cap: ``max_load_tokens``, if limited.

    A search that ends without an answer of 0 has too little left for some
    group: POPPED_OUT if it would have had enough but for the pops.
    """
    drafters = {group.kv_group for group in layout.groups if group.drafter_used}
    walk = _Walk(layout, local, num_tokens, cap, load_cap, drafters)
    answers: list[Answer] = []
    if not queries:
        covered = not layout.groups or not walk.open(walk.groups[0])
        return Replay(answers, Exit.COVERED if covered else Exit.MISS, None, local)
    by_group = layout.by_group()
    # The order that was kept beats the model's: releases measure windows differently.
    order = list(dict.fromkeys(kv_group for kv_group, *_ in queries))
    walk.groups.sort(key=lambda g: order.index(g.kv_group) if g.kv_group in order else len(order))
    asked = iter(queries)
    blame: int | None = None
    found = False
    for number, groups in enumerate(walk.passes(), 1):
        for position, group in enumerate(groups):
            query = next(asked, None)
            if query is None:
                # Which group comes next depends on the release, so any of them may have ended it.
                # If there was enough for all, some other search than vLLM's has ended here.
                short = next((rest for rest in groups[position:] if not walk.open(rest)), None)
                if short is None:
                    return _finish(walk, answers)
                return _too_little(walk, short, answers, blame)
            kv_group, start, _, hits = query
            group, before = by_group[kv_group], walk.bound
            walk.open(group)
            popped = int(walk.pops(group) and bool(hits))
            if hits == 0:
                answers.append(Answer(kv_group, 0, 0, number))
                exit_ = Exit.VETOED if found else Exit.MISS
                return Replay(answers, exit_, kv_group if found else None, local)
            found = True
            enough = walk.close(group, start, hits)
            if walk.bound < before:
                blame = kv_group
            answers.append(Answer(kv_group, popped, walk.bound if enough else 0, number))
            if not enough:
                return _too_little(walk, group, answers, kv_group)
    return _finish(walk, answers)


def _finish(walk: _Walk, answers: list[Answer]) -> Replay:
    exit_ = Exit.DEFERRED_BACKEND if walk.deferred else Exit.SERVED
    return Replay(answers, exit_, None, walk.local + (0 if walk.deferred else walk.hit))


def _too_little(
    walk: _Walk, group: GroupLayout, answers: list[Answer], blame: int | None
) -> Replay:
    popped = walk.unpopped - walk.local >= group.tokens_per_chunk
    if popped and not any(answer.kv_group == blame and answer.popped for answer in answers):
        blame = next((a.kv_group for a in reversed(answers) if a.popped), blame)
    exit_ = Exit.POPPED_OUT if popped else Exit.BELOW_CHUNK
    return Replay(answers, exit_, group.kv_group if blame is None else blame, walk.local)


def _query_stop(walk: _Walk, group: GroupLayout, widen: bool) -> int:
    chunk = group.tokens_per_chunk
    stop = walk.bound
    if walk.pops(group) and (widen or not group.full_attention):
        stop += chunk
    return min(-(-stop // chunk), group.chunks(walk.tokens))


def _window_hits(walk: _Walk, group: GroupLayout, holds: Holds, chunks: range) -> int:
    """End of the last run of hits as long as the window, counted from ``chunks.start``."""
    pop = int(walk.pops(group))
    window = _window_chunks(group, walk.load_window)
    needed = window + pop
    if walk.load_window and group.window is not None:
        # The right edge may lie inside a chunk; allocation then reaches one chunk further back.
        end = min(walk.bound, (chunks.stop - pop) * group.tokens_per_chunk)
        reach = group.window - 1 + group.extra_retained + -end % group.tokens_per_chunk
        needed = max(window, -(-reach // group.tokens_per_chunk)) + pop
    run = 0
    for chunk in reversed(chunks):
        if holds(group.kv_group, chunk):
            run += 1
        else:
            run, needed = 0, window + pop
        if run == needed:
            return chunk - chunks.start + needed
    return run


def _window_chunks(group: GroupLayout, load_window: bool) -> int:
    chunk = group.tokens_per_chunk
    if group.window is not None:
        window = -(-group.window // chunk)
        if load_window:
            window = max(window, -(-(group.window - 1 + group.extra_retained) // chunk))
        return window
    return -(-group.attention_chunk // chunk) if group.attention_chunk else 1
