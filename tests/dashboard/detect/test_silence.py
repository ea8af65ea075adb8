"""N1 to N10 as traffic: all detectors stay silent, whatever the number of requests."""

from __future__ import annotations

import factory
import msgspec
import pytest
from field import INFO, Night, lost, served

from kvlens.telemetry.records import RequestRecord


def local(index: int) -> RequestRecord:
    """N1: the GPU cache answers."""
    return served(
        index,
        verdict="local",
        served_tokens=0,
        servable_tokens=0,
        expected_tokens=0,
        local_tokens=1024,
        loads=[],
    )


def exact_boundary(index: int) -> RequestRecord:
    """N2: one chunk is rightly lost, so that no more is expected."""
    return served(
        index,
        prompt_tokens=10_560,
        served_tokens=8_448,
        servable_tokens=8_448,
        expected_tokens=8_448,
    )


def healthy(index: int) -> RequestRecord:
    """N3."""
    return served(index)


def unique(index: int) -> RequestRecord:
    """N4 and N5: cold."""
    return factory.cold_record(index, INFO)


def skipping(index: int) -> RequestRecord:
    """N6: it does not read, whatever is there."""
    return lost(index, verdict="skipped", cause=None, causes=[], lost_tokens=0)


def remainder(index: int) -> RequestRecord:
    """N9: 16 tokens more could be served, and 1,008 are local."""
    return served(
        index,
        verdict="local",
        served_tokens=0,
        servable_tokens=16,
        expected_tokens=16,
        lost_tokens=16,
        cause="chunk_granularity",
        local_tokens=1008,
    )


def other_connector(index: int) -> RequestRecord:
    """N10: another connector under MultiConnector serves it."""
    record = lost(index)
    lookup = msgspec.structs.replace(record.lookups[-1], exit="other_connector")
    return lost(index, lookups=[lookup], verdict="skipped", lost_tokens=0)


def too_coarse(index: int) -> RequestRecord:
    """F6: no complete chunk exists, so that nothing was lost."""
    return served(
        index,
        verdict="cold",
        cause="chunk_granularity",
        served_tokens=0,
        servable_tokens=0,
        expected_tokens=0,
        prompt_tokens=10_000,
    )


def popped(index: int) -> RequestRecord:
    """F3: all that there is of the prompt is its volatile last chunk."""
    return served(index, verdict="cold", served_tokens=0, servable_tokens=0, expected_tokens=0)


@pytest.mark.parametrize(
    "kind",
    [
        local,
        exact_boundary,
        healthy,
        unique,
        skipping,
        remainder,
        other_connector,
        too_coarse,
        popped,
    ],
)
def test_silence(kind: object) -> None:
    assert callable(kind)
    assert Night().see(kind(n) for n in range(400)).kinds == set()


def test_silence_when_all_of_it_comes_together() -> None:
    kinds = (local, exact_boundary, healthy, unique, skipping, remainder, other_connector)
    assert Night().see(kinds[n % len(kinds)](n) for n in range(700)).kinds == set()
