import re

import msgspec
import pytest
from factory import cold_record, layout, lost_record, served_record
from gallery import gap_record, nine_groups

from kvlens.dashboard.view.cells import CellState
from kvlens.dashboard.view.strip import build_strip
from kvlens.dashboard.web.bars import token_parts
from kvlens.dashboard.web.plot import Plot, draw
from kvlens.telemetry.records import Layout, RequestRecord


def plot_of(record: RequestRecord, known: Layout | None = None) -> Plot:
    strip = build_strip(record, known)
    assert strip is not None
    return draw(strip)


def number(text: str) -> float:
    assert re.fullmatch(r"[\d.]+%", text)
    return float(text[:-1])


def test_cells_tile_the_axis_and_few_chunks_stay_apart() -> None:
    plot = plot_of(lost_record(1, chunks=3), layout())
    for item in plot.rows:
        assert len(item.cells) == 4
        assert sum(number(cell.width) for cell in item.cells) == pytest.approx(100, abs=0.01)
    first = plot.rows[0].cells[2]
    assert first.title.startswith("popped: chunk 2, tokens 1,024 to 1,535.")
    assert "Incomplete" in plot.rows[0].cells[3].title


def test_thousands_of_chunks_become_segments_and_a_lone_gap_is_flagged() -> None:
    plot = plot_of(gap_record(served_record(1), 1e9), nine_groups())
    row = plot.rows[1]
    assert len(row.cells) == 5
    assert [cell.state for cell in row.cells if cell.flag] == [CellState.MISSING]
    assert row.cells[0].label == "896 chunks"
    assert sum(len(item.cells) for item in plot.rows) < 120
    assert {mark.text for mark in plot.marks} == {
        "local: 3,584 tokens",
        "served = servable: 7,168 tokens",
        "expected: 14,336 tokens",
    }


def test_marks_never_share_a_line_and_nothing_served_does_not_look_served() -> None:
    lost = plot_of(lost_record(1), layout()).marks
    assert [(mark.css, mark.text) for mark in lost] == [
        ("local", "local = served: 0 tokens"),
        ("servable", "servable: 1,024 tokens"),
    ]
    assert [mark.line for mark in lost] == [0, 1]
    full = plot_of(served_record(1), layout()).marks
    assert full[-1].css == "servable is-met"
    assert full[-1].anchor == "end"


def test_every_row_has_a_sentence_with_its_numbers() -> None:
    plot = plot_of(lost_record(1, chunks=1), layout())
    assert plot.rows[1].sentence == (
        "Group 1, sliding window, 512 tokens per chunk, treated as drafter; asked for 1 chunk, "
        "1 raw hit, 1 popped, boundary 0 tokens; vetoed here: raw hits 1, after pop 0. "
        "Chunks: 0 popped, 1 not asked."
    )
    untouched = plot_of(cold_record(1), layout()).rows[2]
    assert untouched.sentence.startswith("Group 2, mamba, 512 tokens per chunk, treated as")
    assert "; not asked. " in untouched.sentence


@pytest.mark.parametrize("tokens", [1, 7, 588, 16_384, 1_000_000])
def test_ticks_are_few_and_end_with_the_whole(tokens: int) -> None:
    base = lost_record(1, chunks=1)
    lookup = msgspec.structs.replace(base.lookups[0], num_tokens=tokens)
    record = msgspec.structs.replace(base, prompt_tokens=tokens, lookups=[lookup])
    ticks = plot_of(record).ticks
    assert 2 <= len(ticks) <= 9
    assert ticks[0].text == "0"
    assert ticks[-1].text == f"{tokens:,} tokens"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1100, 0, 0, 1024), [0, 0, 1024, 76]),
        ((1100, 512, 512, 0), [512, 512, 0, 76]),
        ((100, 80, 80, 80), [80, 20, 0, 0]),
        ((0, 0, 0, 0), [0, 0, 0, 0]),
    ],
)
def test_token_bar_always_adds_up(tokens: tuple[int, int, int, int], expected: list[int]) -> None:
    prompt, local, served, lost = tokens
    record = msgspec.structs.replace(
        cold_record(1),
        prompt_tokens=prompt,
        local_tokens=local,
        served_tokens=served,
        lost_tokens=lost,
    )
    parts = token_parts(record)
    assert [part.tokens for part in parts] == expected
    assert sum(part.tokens for part in parts) == prompt
