"""The replay against a model of vLLM's CPU manager, and what is not known."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.telemetry.state.residency import LIVE, Residency, State


def key(n: int, group: int = 0) -> bytes:
    return n.to_bytes(32, "big") + group.to_bytes(4, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(n) for n in numbers]


class Tier:
    """``prepare_store`` and ``complete_store`` of vLLM's CPU manager, least recent first."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.ready: dict[bytes, bool] = {}

    def offer(self, offered: list[bytes]) -> tuple[list[bytes] | None, list[bytes]]:
        new = [k for k in offered if k not in self.ready]
        need = len(new) - (self.slots - len(self.ready))
        idle = [k for k, ready in self.ready.items() if ready and k not in offered]
        if need > len(idle):
            return None, []
        evicted = idle[: max(0, need)]
        for k in evicted:
            del self.ready[k]
        self.ready.update(dict.fromkeys(new, False))
        return new, evicted

    def complete(self, done: list[bytes], success: bool) -> None:
        for k in done:
            if self.ready.get(k) is False:
                if success:
                    self.ready[k] = True
                else:
                    del self.ready[k]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "complete", "fail", "reset", "computed"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(1, 6))
def test_replay_stands_as_the_manager_stands(steps, slots):
    tier, residency = Tier(slots), Residency()
    for what, numbers in steps:
        chosen = [key(n, n % 3) for n in numbers]
        if what == "offer":
            accepted, evicted = tier.offer(chosen)
            residency.offered(chosen, accepted, evicted)
        elif what == "reset":
            tier.ready.clear()
            residency.reset()
        elif what == "computed":
            residency.computed(chosen, State.HELD_BACK)
        else:
            tier.complete(chosen, what == "complete")
            residency.stored(chosen, what == "complete")
        for n in range(12):
            state = residency.state(key(n, n % 3))
            assert (state in LIVE) == (key(n, n % 3) in tier.ready)
            assert (state is State.RESIDENT) == tier.ready.get(key(n, n % 3), False)
        for group in range(3):
            count = sum(ready for k, ready in tier.ready.items() if k[-1] == group)
            assert residency.resident_count(group) == count


@settings(max_examples=200, deadline=None)
@given(STEPS, STEPS, st.integers(1, 6))
def test_after_a_loss_nothing_is_called_resident_that_is_not(before, after, slots):
    tier, residency = Tier(slots), Residency(capacity=slots)
    for lost, steps in ((True, before), (False, after)):
        for what, numbers in steps:
            chosen = keys(*numbers)
            if what == "offer":
                accepted, evicted = tier.offer(chosen)
                if not lost:
                    residency.offered(chosen, accepted, evicted)
            elif what in ("complete", "fail"):
                job = [k for k in chosen if tier.ready.get(k) is False]  # a job completes once
                tier.complete(job, what == "complete")
                if not lost:
                    residency.stored(job, what == "complete")
        if lost:
            residency.new_epoch()
    for n in range(12):
        state = residency.state(key(n))
        if state in LIVE:
            assert key(n) in tier.ready
        elif state is not State.UNKNOWN:
            assert key(n) not in tier.ready
    assert residency.epoch == 1


def test_states_say_why_a_chunk_is_not_there():
    residency = Residency()
    residency.offered(keys(1, 2, 3), keys(1, 2), [])
    assert residency.state(key(3)) is State.EXCLUDED
    residency.stored(keys(1), True)
    residency.stored(keys(2), False)
    assert residency.state(key(2)) is State.FAILED
    residency.offered(keys(4), None, [])
    assert residency.state(key(4)) is State.REFUSED
    residency.computed(keys(1, 4, 5), State.COMPUTED)
    assert [residency.state(k) for k in keys(1, 4, 5)] == [
        State.RESIDENT, State.REFUSED, State.COMPUTED,
    ]  # fmt: skip
    residency.computed(keys(5), State.HELD_BACK)
    assert residency.state(key(5)) is State.HELD_BACK
    residency.offered(keys(6), keys(6), keys(1))
    assert residency.state(key(1)) is State.EVICTED
    assert residency.state(key(6)) is State.PENDING
    assert residency.state(key(9)) is State.NEVER_SEEN
    residency.offered(keys(1), [], [])
    assert residency.state(key(1)) is State.EVICTED, "capacity's, not the policy's"


def test_stored_chunk_offered_again_stays_resident():
    residency = Residency()
    residency.offered(keys(1), keys(1), [])
    residency.stored(keys(1), True)
    residency.offered(keys(1, 2), keys(2), [])
    assert residency.state(key(1)) is State.RESIDENT


def test_loss_of_facts_makes_all_unknown_until_told_anew():
    residency = Residency(capacity=2)
    residency.offered(keys(1, 2), keys(1, 2), [])
    residency.stored(keys(1, 2), True)
    residency.new_epoch()
    assert residency.unknown
    assert residency.resident_count(0) == 0
    assert residency.state(key(1)) is State.UNKNOWN
    assert residency.seen(key(1))
    assert not residency.seen(key(7))
    residency.confirmed(keys(1))
    assert residency.state(key(1)) is State.RESIDENT
    residency.computed(keys(8), State.COMPUTED)
    assert residency.state(key(8)) is State.UNKNOWN, "it may have been stored meanwhile"
    residency.offered(keys(3), [], [])
    assert residency.state(key(3)) is State.PENDING, "not accepted: there, or on its way"
    assert not residency.unknown, "both slots are accounted for"
    assert residency.state(key(2)) is State.EVICTED
    assert residency.state(key(7)) is State.NEVER_SEEN
    residency.confirmed(keys(3))
    assert residency.state(key(3)) is State.RESIDENT


def test_with_a_store_threshold_a_chunk_not_accepted_stays_unknown():
    residency = Residency(store_threshold=2)
    residency.new_epoch()
    residency.offered(keys(3), [], [])
    assert residency.state(key(3)) is State.UNKNOWN
    residency.offered(keys(4), None, keys(5))
    assert residency.state(key(4)) is State.UNKNOWN
    assert residency.state(key(5)) is State.EVICTED


def test_several_losses_keep_what_was_seen_and_a_reset_ends_them():
    residency = Residency()
    residency.offered(keys(1, 2), keys(1, 2), [])
    residency.new_epoch()
    residency.offered(keys(3), keys(3), [])
    residency.new_epoch()
    assert residency.epoch == 2
    assert residency.seen(key(1))
    residency.reset()
    assert not residency.unknown
    assert residency.state(key(1)) is State.NEVER_SEEN
    assert len(residency) == 0


def test_history_is_bounded_and_forgotten_oldest_first():
    residency = Residency(max_keys=640)
    residency.offered(keys(0), keys(0), [])
    residency.stored(keys(0), True)
    for n in range(1, 5000):
        residency.computed(keys(n), State.COMPUTED)
        assert len(residency) <= 640
    assert residency.state(key(0)) is State.RESIDENT
    assert residency.state(key(1)) is State.NEVER_SEEN
    assert residency.state(key(4999)) is State.COMPUTED


def test_live_states_come_from_the_tier_alone():
    with pytest.raises(ValueError, match="PENDING comes from offered"):
        Residency().computed(keys(1), State.PENDING)
    with pytest.raises(ValueError, match="max_keys must be at least 1"):
        Residency(max_keys=0)


def test_memory_of_resident_chunks():
    many = [key(n) for n in range(200_000)]
    tracemalloc.start()
    residency = Residency()
    for i in range(0, len(many), 100):
        batch = many[i : i + 100]
        residency.offered(batch, batch, [])
        residency.stored(batch, True)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / len(many) < 100, "bytes per chunk: 200 MB at 1 M leaves half to vLLM's keys"
    assert residency.resident_count(0) == len(many)
