"""The largest boundary that can be served, found with few questions.

``telemetry.oracle`` defines what a boundary needs; this search finds the same one
on the scheduler thread. It only ever lowers the boundary, and only by what a
missing chunk rules out for certain:

- A full-attention group needs everything from the local prefix on. One ascending
  scan settles it: a lower boundary needs a part of what was found.
- Any other group needs a window that ends at the boundary. It is scanned from its
  end; a missing chunk rules out every boundary whose window would hold it.

No chunk is asked for twice. One whose answer is still to come counts as a hit, so
that the boundary found is the best that is possible. It is also certain if it
needs no such chunk, and worth waiting for if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from vllm.v1.kv_offload.base import LookupResult

from kvlens.telemetry.records import GroupLayout, Layout

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
Keys = Sequence[Sequence[bytes]]
"""Per group, in the configuration's order: the keys of the request's chunks."""
Ask = Callable[[bytes, Any], Any]
"""``OffloadingManager.lookup``: key and request context to ``LookupResult``."""


class UnconfirmedError(RuntimeError):
    """A chunk would be loaded that no lookup of this attempt has found."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one group needs of a boundary; sizes in tokens."""

    position: int
    """Of the group in the scheduler's configuration."""
    chunk: int
    block: int
    pop: int
    """Chunks to be found beyond the boundary: 1 for a drafter group."""
    ahead: int = 0
    """Tokens after a chunk that its key covers as well."""
    state: bool = False
    """A recurrent group: one state, at the end of a chunk."""
    reach: int | None = None
    """Sliding window: tokens kept before the boundary."""
    span: int | None = None
    """Chunked local attention: tokens of one attention chunk."""
    most_blocks: int | None = None
    """Blocks that vLLM lets a windowed group load, where a window can exceed that."""

    def exist(self, tokens: int) -> int:
        """Chunks of so many tokens that have a key."""
        return max(0, tokens - self.ahead) // self.chunk

    def chunks(self, local: int, boundary: int) -> range:
        """Chunks of which allocation leaves blocks to load for ``boundary``."""
        stop = -(-boundary // self.chunk)
        if self.state:
            return range(stop - 1, stop)
        first = local
        if self.reach is not None:
            first = max(local, boundary - self.reach)
        elif self.span is not None:
            if boundary % self.span == 0:
                return range(stop, stop)
            first = max(local, boundary - boundary % self.span)
        return range(first // self.chunk, stop)

    def fitting(self, local: int, boundary: int) -> int:
        """``boundary``, or the next one below that loads no more than ``most_blocks``."""
        if self.most_blocks is None or self.reach is None:
            return boundary
        while boundary > local:
            end = -(-boundary // self.block)
            if end - max(local, boundary - self.reach) // self.block <= self.most_blocks:
                break
            # A lower boundary inside this block would only reach further back.
            boundary = (end - 1) * self.block
        return boundary


@dataclass(frozen=True)
class Rules:
    """All groups, in the order in which they are best asked."""

    full: tuple[Rule, ...]
    windowed: tuple[Rule, ...]
    by_position: tuple[Rule, ...]

    @classmethod
    def of(cls, layout: Layout, window_chunks: Sequence[int | None]) -> Rules:
        """Rules of a layout, with vLLM's ``sliding_window_size_in_chunks`` per group.

        That number limits what a windowed group may load. Before 0.32 it leaves
        ``extra_retained_tokens`` out, which allocation does not.
        """
        every = tuple(
            _rule(position, group, layout.blocks_per_chunk, window)
            for position, (group, window) in enumerate(
                zip(layout.groups, window_chunks, strict=True)
            )
        )
        # Coarse chunks first: a few questions there save many elsewhere.
        ordered = sorted(every, key=lambda rule: rule.chunk, reverse=True)
        full = tuple(rule for rule in ordered if layout.groups[rule.position].full_attention)
        return cls(full, tuple(rule for rule in ordered if rule not in full), every)

    def limit(self, local: int, tokens: int, cap: int | None) -> int:
        """Largest boundary worth asking about, before anything is known to be stored."""
        boundary = tokens - bool(self.windowed)  # windowed: the last token is computed anew
        if cap is not None:
            boundary = min(boundary, local + cap)
        for rule in self.full:
            boundary = min(boundary, (rule.exist(tokens) - rule.pop) * rule.chunk)
        for rule in self.windowed:
            if rule.state:
                boundary -= boundary % rule.chunk
        return boundary

    def stand(
        self, keys: Keys, local: int, boundary: int, tokens: int, known: Mapping[bytes, Any]
    ) -> bool:
        """Whether all that ``boundary`` needs of windowed groups is known to be there."""
        for rule in self.windowed:
            chunk, chunks = rule.chunk, rule.chunks(local, boundary)
            stop = chunks.stop + rule.pop
            if (
                (rule.state and boundary % chunk)
                or stop > rule.exist(tokens)
                or rule.fitting(local, boundary) < boundary
            ):
                return False
            for key in islice(keys[rule.position], chunks.start, stop):
                if known.get(key) is not HIT:
                    return False
        return boundary < tokens or not self.windowed

    def needed(self, keys: Keys, local: int, boundary: int) -> Iterator[bytes]:
        """Keys that are loaded for ``boundary``, in the order of the groups."""
        for rule in self.by_position:
            chunks = rule.chunks(local, boundary)
            yield from islice(keys[rule.position], chunks.start, chunks.stop)


def _rule(position: int, group: GroupLayout, blocks_per_chunk: int, window: int | None) -> Rule:
    reach = most = None
    if group.window is not None:
        reach = group.window - 1 + group.extra_retained
        limit = (window or 0) * blocks_per_chunk + 1
        # ``reach`` tokens lie in at most this many blocks.
        if window is not None and (reach - 2) // group.tokens_per_block + 2 > limit:
            most = limit
    return Rule(
        position=position,
        chunk=group.tokens_per_chunk,
        block=group.tokens_per_block,
        pop=group.pop,
        ahead=group.hash_lookahead,
        state=group.recurrent,
        reach=reach,
        span=group.attention_chunk,
        most_blocks=most,
    )


class Search:
    """One attempt at a lookup: what was asked so far, and what it leaves possible."""

    def __init__(
        self,
        rules: Rules,
        keys: Keys,
        local: int,
        tokens: int,
        ask: Ask,
        context: Any,
    ) -> None:
        """Start an attempt.

        Args:
            rules: of the layout.
            keys: of the request's chunks.
            local: tokens that the GPU cache already covers.
            tokens: all tokens of the request.
            ask: the offloading manager's ``lookup``.
            context: the request's context, handed on to ``ask``.
        """
        self._rules, self._keys, self._local, self._tokens = rules, keys, local, tokens
        self._ask, self._context = ask, context
        self._extra: dict[bytes, Any] = {}
        """Answers for keys that are not a chunk's."""
        self._runs: dict[int, range] = {}
        """Full attention: the unbroken run of chunks found, from the local prefix on."""
        self._asked: dict[int, int] = {}
        """Full attention: end of the chunks asked for."""
        self._waiting: dict[int, int] = {}
        """Full attention: the first chunk of that run whose answer is still to come."""
        self._answers: dict[int, dict[int, Any]] = {r.position: {} for r in rules.windowed}
        self._scanned: dict[int, tuple[int, bool]] = {}
        """Full attention: hits known beforehand, and whether a miss follows."""
        self._hopeful = True
        self.attention: int | None = None
        """Boundary that full attention alone would leave, before the windows lower it: 0 if not
        sure, or if there is none of it; None without windows, or if too little is left for them.
        """
        self.pending = False
        """Whether any answer is still to come; asking may then have moved chunks."""

    def learn(self, position: int, asked: int, hits: int) -> None:
        """Take over a scan of a full-attention group: ``hits`` chunks found of ``asked``."""
        before = self._scanned.get(position, (0, False))
        self._scanned[position] = max(before, (hits, hits < asked))

    def largest(self, cap: int | None) -> int:
        """Largest boundary that no missing chunk rules out; the local one if there is none."""
        local = self._local
        boundary = self._rules.limit(local, self._tokens, cap)
        for rule in self._rules.full:
            if boundary <= local:
                return local
            boundary = min(boundary, self._scan(rule, boundary))
        if boundary > local and self._rules.windowed:
            self.attention = boundary if self._rules.full and not self.pending else 0
        return self._windows(boundary)

    def certain(self, boundary: int) -> bool:
        """Whether every chunk that ``boundary`` needs was found; False if some are awaited.

        Raises :class:`UnconfirmedError` for a chunk that was not even asked for.
        """
        sure = True
        for rule in self._rules.full:
            stop = -(-boundary // rule.chunk) + rule.pop
            run = self._runs.get(rule.position)
            if run is None or run.stop < stop:
                raise UnconfirmedError(f"group {rule.position}: found {run}, needed up to {stop}")
            sure = sure and self._waiting.get(rule.position, stop) >= stop
        for rule in self._rules.windowed:
            sure = self._found(rule, boundary) and sure
        return sure

    def insist(self, boundary: int) -> None:
        """Ask on below ``boundary`` as if chunks not located yet were missing.

        For a manager that locates chunks in the background: it learns now what will
        be asked for if they are.
        """
        self._hopeful = False
        self._windows(boundary)

    def attention_end(self, tokens: int) -> int:
        """Chunks of full attention that are there without a gap, asked for up to ``tokens``."""
        end = tokens // self._rules.by_position[0].chunk
        for rule in self._rules.full:
            run = self._runs.get(rule.position)
            if run is not None:
                self.learn(rule.position, self._asked[rule.position] - run.start, len(run))
            self._scan(rule, max(self._local, min(tokens, end * rule.chunk)))
            end = min(end, self._runs[rule.position].stop)
        return end

    def attention_certain(self, end: int) -> bool:
        """Whether no chunk of full attention below chunk ``end`` is awaited."""
        return all(first >= end for first in self._waiting.values())

    def ask_chunk(self, position: int, chunk: int) -> Any:
        """Answer for a chunk next to what a scan of full attention has found."""
        if chunk < self._asked[position]:
            if chunk >= self._runs[position].stop:
                return MISS
            return HIT if chunk < self._waiting.get(position, chunk + 1) else PENDING
        return self.ask(self._keys[position][chunk])

    def ask(self, key: bytes) -> Any:
        """Answer for a key that is not a complete chunk's, or was not scanned."""
        answer = self._extra.get(key)
        if answer is None:
            answer = self._extra[key] = self._ask(key, self._context)
            self.pending = self.pending or (answer is not HIT and answer is not MISS)
        return answer

    def prefixes(self) -> Iterator[tuple[int, int]]:
        """Position of each full-attention group that was asked, and the end of its sure hits."""
        for position, run in self._runs.items():
            yield position, self._waiting.get(position, run.stop)

    def queries(self, boundary: int) -> Iterator[tuple[Rule, Sequence[bytes], int | None]]:
        """What each group was asked, as vLLM's own search would have asked it.

        Yields the rule, the keys from the local prefix on, and how many of them are
        hits as far as ``boundary`` needs them: None if some of those are awaited.
        """
        for rule in self._rules.full:
            run = self._runs.get(rule.position)
            if run is None:
                continue
            stop = -(-boundary // rule.chunk) + rule.pop
            waits = self._waiting.get(rule.position, run.stop)
            hits = waits - run.start if waits >= min(stop, run.stop) else None
            yield rule, self._keys[rule.position][run.start : self._asked[rule.position]], hits
        for rule in self._rules.windowed:
            answers = self._answers[rule.position]
            if not answers:
                continue
            start = self._local // rule.chunk
            chunks = rule.chunks(self._local, boundary)
            found = [answers.get(k, MISS) for k in range(chunks.start, chunks.stop + rule.pop)]
            hits = 0
            if boundary > self._local and MISS not in found:
                hits = chunks.stop + rule.pop - start if found.count(HIT) == len(found) else None
            yield rule, self._keys[rule.position][start : max(answers) + 1], hits

    def _scan(self, rule: Rule, boundary: int) -> int:
        chunk, position = rule.chunk, rule.position
        start = self._local // chunk
        stop = min(-(-boundary // chunk) + rule.pop, rule.exist(self._tokens))
        hits, missed = self._scanned.get(position, (0, False))
        end = start + hits
        if missed:
            stop = end
        self._asked[position] = max(stop, end + missed)
        keys = islice(self._keys[position], end, stop)
        for answer in map(self._ask, keys, repeat(self._context)):
            if answer is not HIT:
                if answer is MISS:
                    self._asked[position] = end + 1
                    break
                self.pending = True
                self._waiting.setdefault(position, end)
            end += 1
        self._runs[position] = range(start, end)
        return (end - rule.pop) * chunk

    def _windows(self, boundary: int) -> int:
        local, before = self._local, -1
        while local < boundary != before:
            before = boundary
            for rule in self._rules.windowed:
                boundary = self._below(rule, boundary)
        return max(boundary, local)

    def _below(self, rule: Rule, boundary: int) -> int:
        """Largest boundary up to ``boundary`` for which this group has what it needs."""
        local, chunk, pop, span = self._local, rule.chunk, rule.pop, rule.span
        exists = rule.exist(self._tokens)
        while boundary > local:
            boundary = rule.fitting(local, boundary - boundary % chunk if rule.state else boundary)
            if boundary <= local:
                break
            needed = rule.chunks(local, boundary)
            first, stop = needed.start, needed.stop + pop
            missing = max(first, exists) if stop > exists else self._missing(rule, first, stop)
            if first >= stop or missing is None:
                break
            lower = (missing - pop) * chunk
            if span is not None and boundary % span:
                # Where an attention chunk ends nothing is needed but the one to pop.
                lower = max(lower, boundary - boundary % span)
            boundary = lower
        return boundary

    def _missing(self, rule: Rule, first: int, stop: int) -> int | None:
        """Last chunk of ``first`` ... ``stop`` - 1 that is missing."""
        position = rule.position
        answers, keys = self._answers[position], self._keys[position]
        for chunk in range(stop - 1, first - 1, -1):
            answer = answers.get(chunk)
            if answer is None:
                answer = answers[chunk] = self._ask(keys[chunk], self._context)
            if answer is not HIT:
                self.pending = self.pending or answer is not MISS
                if answer is MISS or (answer is RETRY and not self._hopeful):
                    return chunk
        return None

    def _found(self, rule: Rule, boundary: int) -> bool:
        answers = self._answers[rule.position]
        needed = rule.chunks(self._local, boundary)
        found = [answers.get(chunk) for chunk in range(needed.start, needed.stop + rule.pop)]
        if None in found or MISS in found:
            raise UnconfirmedError(f"group {rule.position}: chunks {needed} were not all found")
        return found.count(HIT) == len(found)
