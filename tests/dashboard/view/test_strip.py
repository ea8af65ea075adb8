from itertools import pairwise

import msgspec
import pytest
from factory import cold_record, engine, layout, lost_record, served_record
from gallery import STATE, TOKENS, gap_record, nine_groups
from hypothesis import given
from hypothesis import strategies as st

from kvlens.dashboard.view.cells import CellState
from kvlens.dashboard.view.strip import Strip, StripRow, build_strip, decisive_lookup
from kvlens.telemetry.records import GroupLookup, Lookup, RequestRecord


def strip_of(record: RequestRecord, **kwargs: object) -> Strip:
    strip = build_strip(record, **kwargs)  # type: ignore[arg-type]
    assert strip is not None
    return strip


def states(row: StripRow) -> list[tuple[str, int, int]]:
    return [(run.state.value, run.first, run.last) for run in row.runs]


def lookup(*groups: GroupLookup, local: int = 0, tokens: int = 64, result: int = 0) -> Lookup:
    return Lookup(
        time=1.0,
        seconds=1e-5,
        local_tokens=local,
        num_tokens=tokens,
        attempt=1,
        exit="served" if result else "vetoed",
        result=result,
        groups=list(groups),
    )


def record(*lookups: Lookup, **fields: object) -> RequestRecord:
    base = msgspec.structs.replace(cold_record(1), lookups=list(lookups), prompt_tokens=64)
    return msgspec.structs.replace(base, **fields)


def query(kind: str = "full_attention", size: int = 16, **fields: object) -> GroupLookup:
    given = {"kv_group": 0, "group_kind": kind, "tokens_per_chunk": size, "pass_number": 1}
    return msgspec.convert({**given, **fields}, GroupLookup)


def test_defect_shows_the_pop_and_names_the_vetoing_group() -> None:
    strip = strip_of(lost_record(1, chunks=1), layout=layout())
    assert (strip.local, strip.answered, strip.servable) == (0, 0, 512)
    assert [row.veto for row in strip.rows] == ["", "vetoed here: raw hits 1, after pop 0", ""]
    assert states(strip.rows[1]) == [("popped", 0, 0), ("unasked", 1, 1)]
    assert strip.rows[1].drafter
    assert strip.rows[1].annotated is False


def test_served_request_loads_what_each_kind_needs() -> None:
    strip = strip_of(served_record(1, chunks=3), layout=layout(affected=False))
    assert strip.answered == strip.servable == 3 * 512
    assert states(strip.rows[0]) == [("served", 0, 2), ("unasked", 3, 3)]
    assert states(strip.rows[1]) == [("resident", 0, 1), ("served", 2, 2), ("unasked", 3, 3)]
    assert states(strip.rows[2]) == [("unasked", 0, 1), ("served", 2, 2), ("unasked", 3, 3)]


def test_groups_that_the_lookup_never_reached_have_a_row_that_says_so() -> None:
    strip = strip_of(cold_record(1), layout=layout())
    assert [row.asked for row in strip.rows] == [True, False, False]
    assert states(strip.rows[0]) == [("missing", 0, 1), ("unasked", 2, 2)]
    assert len(strip_of(cold_record(1)).rows) == 1


def test_local_and_hits_beyond_the_boundary() -> None:
    asked = query(start_chunk=1, width=3, raw_hits=2, resident=[(0, 2)])
    strip = strip_of(record(lookup(asked, local=16, result=16), served_tokens=16))
    assert states(strip.rows[0]) == [
        ("local", 0, 0),
        ("served", 1, 1),
        ("hit", 2, 2),
        ("missing", 3, 3),
    ]


def test_a_gap_leaves_what_lies_behind_it_stored_but_not_asked() -> None:
    asked = query(width=4, raw_hits=1, resident=[(0, 0), (2, 3)])
    strip = strip_of(record(lookup(asked)))
    assert states(strip.rows[0]) == [("hit", 0, 0), ("missing", 1, 1), ("resident", 2, 3)]


def test_passes_of_one_group_share_a_row_and_the_last_has_the_numbers() -> None:
    first = query(width=4, raw_hits=4, popped=1, boundary=48, drafter=True)
    second = query(width=2, raw_hits=2, boundary=32, pass_number=2, drafter=True)
    (row,) = strip_of(record(lookup(first, second, result=32), served_tokens=32)).rows
    assert states(row) == [("served", 0, 1), ("hit", 2, 2), ("popped", 3, 3)]
    assert (row.width, row.raw_hits, row.popped, row.boundary) == (2, 2, 0, 32)


def test_deferred_and_truncated_say_what_is_not_known() -> None:
    asked = query(width=4, raw_hits=None, resident=[(0, 0)], truncated=True)
    (row,) = strip_of(record(lookup(asked), vetoing_group=0)).rows
    assert states(row) == [("resident", 0, 0), ("unknown", 1, 3)]
    assert row.veto == "vetoed here: answer deferred"


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"pass_number": 0}, "vetoed here: never asked"),
        ({"width": 4, "raw_hits": 2}, "vetoed here: raw hits 2 of 4 asked"),
    ],
)
def test_veto_labels(fields: dict[str, object], label: str) -> None:
    (row,) = strip_of(record(lookup(query(**fields)), vetoing_group=0)).rows
    assert row.veto == label


def test_windows_without_the_layout_claim_the_last_chunk_only() -> None:
    served = lookup(query("sliding_window", width=3, raw_hits=3), result=48)
    (row,) = strip_of(record(served, served_tokens=48)).rows
    assert row.count(CellState.SERVED) == 1


def test_nine_groups_and_a_lone_gap_in_4096_chunks() -> None:
    strip = strip_of(gap_record(served_record(1), 1e9), layout=nine_groups())
    assert (strip.tokens, strip.local, strip.answered) == (TOKENS, STATE, 2 * STATE)
    assert strip.expected == 4 * STATE
    assert strip.rows[1].veto == "limited here: raw hits 1,354 of 2,688 asked"
    assert states(strip.rows[1]) == [
        ("local", 0, 895),
        ("served", 896, 1791),
        ("hit", 1792, 2249),
        ("missing", 2250, 2250),
        ("resident", 2251, 4095),
    ]
    assert [row.count(CellState.SERVED) for row in strip.rows[2:6]] == [1, 1, 1, 1]
    # A window of 64 that ends at a chunk's end is that chunk; the popped one follows it.
    assert states(strip.rows[6])[2:4] == [("served", 111, 111), ("popped", 112, 112)]
    assert strip.rows[8].runs[-1].state is CellState.UNKNOWN


def test_decisive_is_the_first_admitted_answer() -> None:
    deferred = msgspec.structs.replace(lookup(query()), exit="deferred_backend", result=None)
    refused = msgspec.structs.replace(lookup(query(), result=32), exit="not_admitted")
    answered, later = lookup(query(), result=32), lookup(query(), result=48)
    chosen = decisive_lookup(record(deferred, refused, answered, later, served_tokens=32))
    assert chosen == answered
    assert decisive_lookup(record(deferred, refused)) == refused
    assert decisive_lookup(record()) is None
    assert build_strip(record()) is None


def test_nonsense_from_outside_draws_nothing() -> None:
    assert build_strip(record(lookup(query(size=0)))) is None


@given(
    size=st.sampled_from([1, 7, 16, 64]),
    local=st.integers(0, 100),
    start=st.integers(0, 120),
    width=st.integers(0, 120),
    raw=st.none() | st.integers(0, 120),
    popped=st.integers(0, 1),
    result=st.integers(0, 100),
    kind=st.sampled_from(["full_attention", "sliding_window", "mamba", "chunked_local", "odd"]),
    resident=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=6),
)
def test_runs_tile_the_prompt(
    size: int,
    local: int,
    start: int,
    width: int,
    raw: int | None,
    popped: int,
    result: int,
    kind: str,
    resident: list[tuple[int, int]],
) -> None:
    asked = query(
        kind, size, start_chunk=start, width=width, raw_hits=raw, popped=popped, resident=resident
    )
    found = lookup(asked, local=local, tokens=100, result=result)
    (row,) = strip_of(record(found, vetoing_group=0), layout=engine().layout).rows[:1]
    runs = row.runs
    assert runs[0].first == 0
    assert runs[-1].last == row.chunks - 1
    assert runs[-1].end_token == 100
    for left, right in pairwise(runs):
        assert right.first == left.last + 1
        assert right.start_token == left.end_token
        assert right.state is not left.state
