"""What is remembered of a request, and by which name."""

import pytest
from recording import Engine

from kvlens.telemetry import records
from kvlens.telemetry.assembly.open_request import MAX_ID, MAX_LOOKUPS, bounded_id, external_id


@pytest.mark.parametrize(
    ("internal", "external"),
    [
        ("cmpl-a-0-0123abcd", "cmpl-a-0"),
        ("cmpl-a-0", "cmpl-a-0"),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        ("1_cmpl-a-0-0123abcd", "cmpl-a-0"),  # n > 1
        ("12_chatcmpl-a-0123abcd", "chatcmpl-a"),
        ("cmpl-1_cmpl-a-0123abcd", "cmpl-1_cmpl-a"),
        ("7_mine-0123abcd", "7_mine"),  # an id of somebody's own
    ],
)
def test_the_id_is_that_of_vllms_own_span(internal, external):
    assert external_id(internal) == external


def test_an_id_that_a_client_made_too_long_is_cut_and_stays_its_own():
    first, second = (f"cmpl-{'x' * 60_000}-{n}-0123abcd" for n in range(2))
    assert len(bounded_id(first)) == MAX_ID
    assert bounded_id(first).startswith("cmpl-xx")
    assert bounded_id(first) != bounded_id(second)
    assert bounded_id("cmpl-a") == "cmpl-a"
    run = Engine()
    run.serve_cold(first, "doc", 130)
    (record,) = run.settle()
    assert len(record.request_id) == len(record.internal_request_id) == MAX_ID
    assert len(records.encode(record)) < 4000


def test_lookups_that_all_differ_are_bounded_and_all_counted():
    """F11: a retry that discards its scan may ask for another number each time."""
    run, asked = Engine(), 4 * MAX_LOOKUPS
    run.add("b", 130)
    for number in range(asked):
        run.look("b", "doc", 130, None, [(0, 1 + number % 2, None)])
    run.now += 20_000_000_000
    run.finish("b", "doc", 130, computed=0)
    (record,) = run.settle()
    attempts = [lookup.attempt for lookup in record.lookups]
    assert len(attempts) == MAX_LOOKUPS
    assert attempts[:3] == [1, 2, 3]
    assert attempts[-1] == asked
    assert attempts == sorted(attempts)
    assert record.truncated
    assert record.evidence["deferred_lookups"] == asked
    assert f"({asked:,} lookups)" in record.summary
