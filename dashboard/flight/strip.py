"""The chunk strip in a terminal: a row per KV-cache group, all on one axis of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvlens.dashboard.flight.terminal import Terminal, fit
from kvlens.dashboard.view import words
from kvlens.dashboard.view.cells import CellState
from kvlens.dashboard.view.format import plural
from kvlens.dashboard.view.strip import Strip, StripRow

_LABEL: Final = 24
_STATES: Final = (
    CellState.MISSING,
    CellState.POPPED,
    CellState.HIT,
    CellState.RESIDENT,
    CellState.UNKNOWN,
    CellState.SERVED,
    CellState.LOCAL,
    CellState.UNASKED,
)
"""Where a column stands for chunks of several states, the first of these is shown."""
_UNICODE: Final[Mapping[CellState, str]] = {
    CellState.LOCAL: "▓",
    CellState.SERVED: "█",
    CellState.POPPED: "▚",
    CellState.HIT: "▒",
    CellState.RESIDENT: "░",
    CellState.UNKNOWN: "?",
    CellState.MISSING: "x",
    CellState.UNASKED: "·",
}
_ASCII: Final[Mapping[CellState, str]] = {
    CellState.LOCAL: "=",
    CellState.SERVED: "#",
    CellState.POPPED: "%",
    CellState.HIT: "+",
    CellState.RESIDENT: "o",
    CellState.UNKNOWN: "?",
    CellState.MISSING: "x",
    CellState.UNASKED: ".",
}
_TONES: Final[Mapping[CellState, str]] = {
    CellState.MISSING: "bad",
    CellState.POPPED: "bad",
    CellState.HIT: "warn",
    CellState.RESIDENT: "warn",
    CellState.SERVED: "good",
}


def draw(terminal: Terminal, strip: Strip) -> None:
    """Print a strip with its boundaries and its legend."""
    glyphs = _UNICODE if terminal.shows("".join(_UNICODE.values())) else _ASCII
    width = min(terminal.width - _LABEL - 1, strip.tokens)
    per_column = f"1 column = {strip.tokens / width:,.4g} tokens"
    terminal.line(
        f"{'group kind/chunk':<{_LABEL}}{f'0 to {strip.tokens:,} tokens':<24}{per_column}"
    )
    for group in strip.rows:
        name = f"{group.kv_group} {group.kind}/{group.tokens_per_chunk:,}"
        cells = _cells(group, strip.tokens, width)
        painted = "".join(_paint(terminal, state, count, glyphs) for state, count in _same(cells))
        terminal.line(f"{fit(name, _LABEL - 1)} {painted}")
        terminal.wrapped("", _numbers(group), _LABEL)
    for boundary, names in _boundaries(strip).items():
        column = min(boundary * width // strip.tokens, width - 1)
        text = f"{boundary:,} {', '.join(names)}"
        mark = f"^ {text}" if column + len(text) + 2 <= width else f"{text} ^"
        start = column if mark.startswith("^") else max(column + 1 - len(mark), 0)
        terminal.line(f"{'':{_LABEL}}{'':{start}}{mark}")
    used = {run.state for group in strip.rows for run in group.runs}
    for state in (state for state in CellState if state in used):
        word = words.CELLS[state]
        glyph = _paint(terminal, state, 1, glyphs)
        terminal.line(f"  {glyph} {word.label}: {word.help[0].lower()}{word.help[1:]}")


def _cells(group: StripRow, tokens: int, width: int) -> list[CellState]:
    """State shown in each column."""
    cells = [CellState.UNASKED] * width
    for state in reversed(_STATES):
        for run in group.runs:
            if run.state is state:
                first = run.start_token * width // tokens
                last = min(-(-run.end_token * width // tokens), width)
                cells[first:last] = [state] * (last - first)
    return cells


def _same(cells: list[CellState]) -> Iterator[tuple[CellState, int]]:
    start = 0
    for index in range(1, len(cells) + 1):
        if index == len(cells) or cells[index] is not cells[start]:
            yield cells[start], index - start
            start = index


def _paint(
    terminal: Terminal, state: CellState, count: int, glyphs: Mapping[CellState, str]
) -> str:
    return terminal.colour(glyphs[state] * count, _TONES.get(state, "quiet"))


def _numbers(group: StripRow) -> str:
    drafter = "drafter group, " if group.drafter else ""
    window = f"window {group.window:,}, " if group.window is not None else ""
    if group.veto and not group.asked:
        return f"{drafter}{window}{group.veto}"
    if not group.asked:
        return f"{drafter}{window}never asked"
    found = "answer deferred" if group.raw_hits is None else f"found {group.raw_hits:,}"
    popped = f", popped {group.popped}" if group.popped else ""
    veto = f"; {group.veto}" if group.veto else ""
    return (
        f"{drafter}{window}asked {plural(group.width, 'chunk')}, {found}{popped}, "
        f"boundary {group.boundary:,}{veto}"
    )


def _boundaries(strip: Strip) -> dict[int, list[str]]:
    marks = {strip.local: ["local"]} if strip.local else {}
    for name, boundary in (
        ("served", strip.answered),
        ("servable", strip.servable),
        ("expected", strip.expected),
    ):
        if boundary > strip.local:
            marks.setdefault(boundary, []).append(name)
    return dict(sorted(marks.items()))
