"""What a verdict is made from, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlens.telemetry.records import GroupLookup, Layout
from kvlens.telemetry.semconv import Cause, Confidence, Verdict
from kvlens.telemetry.state.residency import LIVE, State
from kvlens.telemetry.verdict.oracle import servable_boundary

StateOf = Callable[[int, int], State]
"""``(kv_group, chunk index)`` -> state of that chunk when the lookup ran."""


def _never_seen(_kv_group: int, _chunk: int) -> State:
    return State.NEVER_SEEN


@dataclass(frozen=True)
class UnsafeState:
    """A recurrent state that does not belong to the boundary served."""

    kv_group: int
    chunk: int
    """Chunk whose state was loaded."""
    state_tokens: int
    """Tokens that this state has already taken in."""


@dataclass(frozen=True)
class Case:
    """One request as the engine treated it.

    ``served``, ``servable`` and ``expected`` are tokens beyond ``local``;
    chunks are counted per group from the prompt's start.
    """

    layout: Layout
    prompt_tokens: int
    num_tokens: int
    """All tokens of the request at the lookup."""
    local: int = 0
    served: int = 0
    servable: int = 0
    expected: int = 0
    state: StateOf = _never_seen
    residency_known: bool = True
    seen_before: bool = False
    """Whether any chunk of the prompt was known before it came."""

    exit: str | None = None
    """Exit of the lookup that was answered last, None if there was none."""
    vetoing_group: int | None = None
    lookups: Sequence[GroupLookup] = ()
    """Group queries of that lookup."""
    cap: int | None = None
    """``max_num_new_tokens`` of that lookup, if limited."""
    load_cap: int | None = None
    """``max_load_tokens`` of the request, if limited."""
    failed: int = 0
    """Tokens that it was admitted with, and whose load then failed."""
    unstarted: bool = False
    """It ended before anything was computed for it."""
    skip_reading: bool = False
    other_connector: bool = False

    block_drop: bool = False
    """Whether speculative decoding drops the volatile last block."""
    widens: bool = True
    """Whether the engine's search asks every drafter group for one chunk more."""
    load_window: bool = True
    """Whether its windows reach as far as allocation does (vLLM 0.30 and newer)."""

    offload_prompt_only: bool = True
    store_threshold: int = 0
    retention_interval: int | None = None
    """Tokens between the windows that are kept besides a prompt's last; None: all are."""
    capacity_chunks: int | None = None
    slots_needed: int | None = None
    """Slots that the prompt takes in the tier; every complete chunk by default."""
    persistent_tier: bool = False
    """Whether the tier outlives the engine (disk, object store)."""
    lower_tiers: bool = False
    """Whether there are tiers of which nobody tells what is in them."""
    hash_seed_fixed: bool = True
    """Whether block hashes are the same in every process (``PYTHONHASHSEED``)."""

    deferral_seconds: float = 0.0
    deferrals: int = 0
    """Lookups that were deferred."""
    deferred_exit: str | None = None
    """Exit of the last of them."""
    waited_for: tuple[int, int] | None = None
    """``(kv_group, chunk)`` that was being written when it had last waited for some seconds."""
    unresolved: bool = False
    """Its lookup is still deferred, or was when the request ended."""

    unsafe: UnsafeState | None = None
    """Known to have been loaded; otherwise it follows from layout and boundary."""
    unwritten: tuple[int, int] | None = None
    """``(kv_group, chunk)`` that was stored with a slot never written."""

    @property
    def target(self) -> int:
        """Tokens beyond the local ones that could have been served."""
        return max(self.servable, self.expected)

    @property
    def slots(self) -> int:
        """Slots that the prompt takes in the tier."""
        if self.slots_needed is not None:
            return self.slots_needed
        return sum(self.prompt_tokens // g.tokens_per_chunk for g in self.layout.groups)

    def resident(self, kv_group: int, chunk: int) -> bool:
        """Whether that chunk could be loaded."""
        return self.state(kv_group, chunk) is State.RESIDENT

    def boundary_if(self, *states: State) -> int:
        """Boundary in tokens if what could be kept, and chunks in ``states``, were there.

        What was served needs no second look: a boundary further on needs nothing
        below the served one that this did not need as well.
        """
        cap = None if self.least_cap is None else max(0, self.least_cap - self.served)
        reached = self.local + self.served
        return expected_boundary(self.layout, self.state, reached, self.num_tokens, cap, states)

    def chunks_in(self, state: State) -> Iterator[tuple[int, int]]:
        """``(kv_group, chunk)`` of the request's complete chunks in ``state``."""
        for group in self.layout.groups:
            for chunk in range(group.chunks(self.num_tokens)):
                if self.state(group.kv_group, chunk) is state:
                    yield group.kv_group, chunk

    @property
    def first_pending(self) -> tuple[int, int] | None:
        """``(kv_group, chunk)`` of the first chunk that is being written."""
        return next(self.chunks_in(State.PENDING), None)

    @property
    def all_known(self) -> bool:
        """Whether it is known of every complete chunk where it is."""
        if not self.residency_known or not self.lower_tiers:
            return self.residency_known
        return all(
            self.state(group.kv_group, chunk) in LIVE
            for group in self.layout.groups
            for chunk in range(group.chunks(self.num_tokens))
        )

    @property
    def least_cap(self) -> int | None:
        """The tighter of both limits on tokens to load, if any."""
        return min((c for c in (self.cap, self.load_cap) if c is not None), default=None)


@dataclass(frozen=True)
class Judgement:
    """What became of a request's reusable tokens, why, and what to do about it."""

    verdict: Verdict
    summary: str
    """One sentence that says what happened, with the numbers."""
    cause: Cause | None = None
    causes: list[Cause] = field(default_factory=list)
    """All equally small explanations; the first is ``cause``."""
    confidence: Confidence = Confidence.CERTAIN
    vetoing_group: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    next_step: str = ""
    servable: int = 0
    """Tokens as they enter the record: 0 where the request did not read at all."""
    expected: int = 0
    lost_at_lookup: int = 0
    lost_at_store: int = 0
    evicted: int = 0
    """Tokens that were stored, evicted for want of room and computed again."""

    @property
    def lost(self) -> int:
        """Tokens that were computed again although they need not have been."""
        return self.lost_at_lookup + self.lost_at_store


_KEPT = frozenset({State.RESIDENT, State.PENDING, State.HELD_BACK, State.REFUSED, State.FAILED})


def expected_boundary(
    layout: Layout,
    state: StateOf,
    local: int,
    tokens: int,
    cap: int | None = None,
    also: Sequence[State] = (),
) -> int:
    """Boundary in tokens, had every chunk computed before been stored and kept.

    Left out are chunks that policy excludes, that capacity evicted, that this
    engine never computed or of which nothing is known. Of a recurrent group a
    chunk that was never offered does not count: states are materialised only
    where a scheduling step ended, so that most chunks have none to store.

    Args:
        layout: the groups; their annotated ``drafter`` flags count.
        state: of each chunk at the lookup.
        local: tokens that the GPU cache already covers.
        tokens: all tokens of the request.
        cap: at most that many tokens beyond ``local``, if limited.
        also: further states to count as kept.
    """
    kept = _KEPT.union(also)
    attention = kept | {State.COMPUTED}
    counted = {g.kv_group: kept if g.recurrent else attention for g in layout.groups}
    return servable_boundary(
        layout, lambda group, chunk: state(group, chunk) in counted[group], local, tokens, cap=cap
    )
