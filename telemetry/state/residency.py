"""What is stored in the offload tier, replayed from the ordered facts.

The replay makes no lookups of its own. It is exact for a manager that, like
vLLM's CPU manager, reports evictions in the call that causes them, drops what
failed to store and never evicts what is in flight. What no fact tells is
:attr:`State.UNKNOWN`, never resident.

Keys are references to vLLM's own ``bytes`` (block hash, then four bytes of
group index): they are hashed and compared, never copied. One resident chunk
costs about 42 bytes here, so a million take about 42 MB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import IntEnum
from itertools import islice
from typing import Final

from kvlens.telemetry.facts import count_by_group, group_of


class State(IntEnum):
    """What became of one chunk of KV data."""

    NEVER_SEEN = 0
    COMPUTED = 1
    """This engine computed the complete chunk, but it was never offered."""
    PENDING = 2
    """Accepted by the tier, its transfer still in flight."""
    RESIDENT = 3
    EVICTED = 4
    REFUSED = 5
    """Offered, but the tier had no room for it."""
    HELD_BACK = 6
    """A drafter group's volatile last chunk, not offered by the end of the request."""
    EXCLUDED = 7
    """Left out by policy (``store_threshold``, ``offload_prompt_only``, ...)."""
    UNKNOWN = 8
    """Facts were lost, and none since tells where this chunk is."""
    FAILED = 9
    """Accepted by the tier, but its transfer failed."""

    OFFERED = 2
    """Another name of :attr:`PENDING`."""


LIVE: Final = frozenset({State.PENDING, State.RESIDENT})
"""States that occupy a slot of the tier."""

_Maps = tuple[dict[bytes, State], dict[bytes, State]]


class Residency:
    """State of every chunk that was ever seen, within a bound.

    Args:
        max_keys: keys remembered in all. History (what is not in the tier) is
            forgotten oldest first; what is in the tier is bounded by the tier
            itself and never forgotten.
        capacity: slots of the tier, if known: lets residency become known
            again once as many chunks are accounted for.
        store_threshold: vLLM's setting; from 2 on, a chunk that was offered
            and not accepted may have been left out rather than be there already.

    Not thread-safe: it belongs to the drain thread.
    """

    def __init__(
        self, max_keys: int = 2_000_000, capacity: int | None = None, store_threshold: int = 0
    ) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, got {max_keys}")
        self.capacity = capacity
        self.epoch = 0
        """Rises by one each time facts were lost."""
        self.unknown = False
        """Whether chunks may be resident of which nothing is known."""
        self._max_keys = max_keys
        self._trim = max(1, max_keys // 64)
        self._threshold = store_threshold
        self._live: dict[bytes, State] = {}
        self._history: dict[bytes, State] = {}
        self._before: _Maps = ({}, {})
        self._resident: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(map(len, (self._live, self._history, *self._before)))

    def offered(
        self, keys: Iterable[bytes], accepted: Collection[bytes] | None, evicted: Iterable[bytes]
    ) -> None:
        """Replay one ``prepare_store``; ``accepted`` None means refused for want of room."""
        for key in evicted:
            self._remove(key, State.EVICTED)
        if accepted is None:
            # Some of a refused offer may be in the tier already: with facts lost, which is open.
            self._note(keys, State.UNKNOWN if self.unknown else State.REFUSED)
            return
        taken = accepted if isinstance(accepted, (set, frozenset, dict)) else frozenset(accepted)
        rest = [key for key in keys if key not in taken and key not in self._live]
        if self.unknown and self._threshold < 2:
            for key in rest:  # nothing else excludes it: it is there, if perhaps still in flight
                self._insert(key, State.PENDING)
        else:
            # What capacity evicted before stays capacity's, though policy keeps it out now.
            never = (key for key in rest if self._history.get(key) is not State.EVICTED)
            self._note(never, State.UNKNOWN if self.unknown else State.EXCLUDED)
        self._live.update(dict.fromkeys(accepted, State.PENDING))
        for key in list(filter(self._history.__contains__, accepted)):
            del self._history[key]
        self._bound()

    def stored(self, keys: Iterable[bytes], success: bool) -> None:
        """Replay one ``complete_store``."""
        if success and not self.unknown:
            live = self._live
            arrived = [key for key in keys if live.get(key) is State.PENDING]
            live.update(dict.fromkeys(arrived, State.RESIDENT))
            self._resident.update(count_by_group(arrived))
            return
        for key in keys:
            pending = self._live.get(key) is State.PENDING
            if success and (pending or (self.unknown and key not in self._live)):
                self._insert(key, State.RESIDENT)
            elif pending:
                self._remove(key, State.FAILED)
        self._bound()

    def computed(self, keys: Iterable[bytes], state: State) -> None:
        """Note chunks that were computed; what is in the tier stays as it is.

        ``state`` says why they are not in the tier (COMPUTED, HELD_BACK,
        EXCLUDED); COMPUTED, which gives no reason, never replaces one.
        """
        if state in LIVE:
            raise ValueError(f"{state.name} comes from offered() and stored() only")
        self._note(keys, State.UNKNOWN if self.unknown else state)
        self._bound()

    def confirmed(self, keys: Iterable[bytes]) -> int:
        """Note chunks that a lookup found; returns how many were not known to be resident."""
        found = 0
        for key in keys:
            if self._live.get(key) is not State.RESIDENT:
                self._insert(key, State.RESIDENT)
                found += 1
        if found:
            self._bound()
        return found

    def reset(self) -> None:
        """Replay ``reset_cache``: the tier is empty and old KV data is void."""
        self._live = {}
        self._history = {}
        self._before = ({}, {})
        self._resident.clear()
        self.unknown = False

    def new_epoch(self) -> None:
        """Facts were lost: until told anew, no chunk's residency is known."""
        self.epoch += 1
        self.unknown = True
        # Of several epochs in a row the fullest says best what was seen before;
        # merging them would stall the engine, just when it is overloaded.
        if len(self._live) + len(self._history) >= sum(map(len, self._before)):
            self._before = (self._live, self._history)
        self._live = {}
        self._history = {}
        self._resident.clear()

    def state(self, key: bytes) -> State:
        """State of one chunk now."""
        state = self._live.get(key) or self._history.get(key)
        if state is not None:
            return state
        if self.unknown:
            return State.UNKNOWN
        live, history = self._before
        return State.EVICTED if key in live else history.get(key, State.NEVER_SEEN)

    def resident_flags(self, keys: Iterable[bytes]) -> bytes:
        """Per key 1 if it is resident now, else 0."""
        return bytes([state is State.RESIDENT for state in map(self._live.get, keys)])

    def seen(self, key: bytes) -> bool:
        """Whether any fact ever named this chunk."""
        return any(key in known for known in (self._live, self._history, *self._before))

    def resident_count(self, group: int) -> int:
        """Resident chunks of one KV-cache group."""
        return self._resident[group]

    def resident_counts(self) -> dict[int, int]:
        """Resident chunks by KV-cache group."""
        return dict(self._resident)

    def _insert(self, key: bytes, state: State) -> None:
        if state is State.RESIDENT and self._live.get(key) is not State.RESIDENT:
            self._resident[group_of(key)] += 1
        self._live[key] = state
        self._history.pop(key, None)

    def _remove(self, key: bytes, state: State) -> None:
        if self._live.pop(key, None) is State.RESIDENT:
            self._resident[group_of(key)] -= 1
        # Re-inserted at the end: history is forgotten in the order of its last change.
        self._history.pop(key, None)
        self._history[key] = state

    def _note(self, keys: Iterable[bytes], state: State) -> None:
        live, history = self._live, self._history
        weak = state in (State.COMPUTED, State.UNKNOWN)
        for key in keys:
            if key not in live and not (weak and key in history):
                history.pop(key, None)
                history[key] = state

    def _bound(self) -> None:
        if self.unknown and self.capacity is not None and len(self._live) >= self.capacity:
            self.unknown = False  # every slot is accounted for
        excess = len(self) - self._max_keys
        if excess <= 0:
            return
        # In batches, since each deletion at the front of a dict leaves a hole to step over.
        excess += self._trim
        for old in (*self._before, self._history):
            for key in list(islice(old, min(excess, len(old)))):
                del old[key]
                excess -= 1
