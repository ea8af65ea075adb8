"""Geometry of the chunk strip: percentages for SVG attributes.

Percentages instead of pixels let one drawing serve every width without script.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvlens.dashboard.view.cells import CellState, Run
from kvlens.dashboard.view.format import plural, words
from kvlens.dashboard.view.strip import Strip, StripRow
from kvlens.dashboard.view.words import CELLS, HELP
from kvlens.dashboard.web.bars import percent

SEPARATE_CHUNKS = 64
"""Rows with at most this many chunks show each as a cell of its own."""
_TINY_PERCENT = 0.5
_TEXT_PERCENT = 9.0
_NARROW_TEXT_PERCENT = 26.0
_FLAGGED = frozenset({CellState.POPPED, CellState.MISSING, CellState.HIT})
"""States that must be seen however small: a lone gap in thousands of chunks is the finding."""


@dataclass(frozen=True)
class Cell:
    """One rectangle: a chunk, or a run of them; ``x`` and ``width`` in percent."""

    state: CellState
    x: str
    width: str
    title: str
    label: str
    """Short text inside, where there is room for it."""
    middle: str
    flag: bool
    """Too small to be seen without a pointer above it."""
    css: str


@dataclass(frozen=True)
class Mark:
    """A vertical boundary; marks at the same token are one, ``names`` has all of them."""

    css: str
    token: int
    x: str
    text: str
    help: str
    anchor: str
    dx: int
    line: int


@dataclass(frozen=True)
class PlotRow:
    """A row of the strip, ready to draw."""

    row: StripRow
    cells: tuple[Cell, ...]
    badge: str
    badge_help: str
    sentence: str


@dataclass(frozen=True)
class Tick:
    """A number on the token axis."""

    x: str
    text: str
    anchor: str
    css: str


@dataclass(frozen=True)
class Plot:
    """The whole strip, ready to draw."""

    strip: Strip
    rows: tuple[PlotRow, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    states: tuple[CellState, ...]
    """States that occur, for the legend."""


def draw(strip: Strip) -> Plot:
    """Lay out ``strip``."""
    present = {run.state for row in strip.rows for run in row.runs}
    return Plot(
        strip=strip,
        rows=tuple(_row(row, strip) for row in strip.rows),
        marks=tuple(_marks(strip)),
        ticks=tuple(_ticks(strip.tokens)),
        states=tuple(state for state in CellState if state in present),
    )


def _row(row: StripRow, strip: Strip) -> PlotRow:
    separate = row.chunks <= SEPARATE_CHUNKS
    runs = [cell for run in row.runs for cell in _split(run, row, strip)] if separate else row.runs
    badge, badge_help = _badge(row)
    return PlotRow(
        row=row,
        cells=tuple(_cell(run, row, strip.tokens) for run in runs),
        badge=badge,
        badge_help=badge_help,
        sentence=_sentence(row, badge),
    )


def _split(run: Run, row: StripRow, strip: Strip) -> Iterable[Run]:
    for chunk in range(run.first, run.last + 1):
        start = chunk * row.tokens_per_chunk
        yield Run(run.state, chunk, chunk, start, min(start + row.tokens_per_chunk, strip.tokens))


def _cell(run: Run, row: StripRow, tokens: int) -> Cell:
    share = 100 * (run.end_token - run.start_token) / tokens
    label = "" if share < _TEXT_PERCENT else _label(run, row)
    css = f"cell-{run.state.value}" + (" tiny" if share < _TINY_PERCENT else "")
    return Cell(
        state=run.state,
        x=percent(run.start_token, tokens),
        width=percent(run.end_token - run.start_token, tokens),
        title=_title(run, row),
        label=label,
        middle=percent((run.start_token + run.end_token) / 2, tokens),
        flag=share < _TINY_PERCENT and run.state in _FLAGGED,
        css=css + (" narrow-hide" if share < _NARROW_TEXT_PERCENT else ""),
    )


def _label(run: Run, row: StripRow) -> str:
    return f"{run.count:,} chunks" if row.chunks > SEPARATE_CHUNKS else f"{run.first:,}"


def _title(run: Run, row: StripRow) -> str:
    word = CELLS[run.state]
    chunks = f"chunk {run.first:,}" if run.count == 1 else f"chunks {run.first:,} to {run.last:,}"
    text = f"{word.label}: {chunks}, tokens {run.start_token:,} to {run.end_token - 1:,}."
    incomplete = run.end_token < (run.last + 1) * row.tokens_per_chunk
    return f"{text} {word.help}" + (" Incomplete: never offloaded whole." if incomplete else "")


def _badge(row: StripRow) -> tuple[str, str]:
    if row.drafter and row.annotated is False:
        return (
            "treated as drafter",
            "The connector pops this group's last chunk, though the model does not mark it as "
            "holding drafter layers.",
        )
    if row.drafter:
        return "drafter", "Holds drafter layers: its last matched chunk is volatile and popped."
    if row.annotated:
        return "drafter, not popped", "Holds drafter layers, but this lookup did not pop it."
    return "", ""


def _sentence(row: StripRow, badge: str) -> str:
    """The row in words: what a screen reader says instead of the drawing."""
    head = f"Group {row.kv_group}, {words(row.kind)}, {row.tokens_per_chunk:,} tokens per chunk"
    hits = "answer deferred" if row.raw_hits is None else plural(row.raw_hits, "raw hit")
    asked = "not asked"
    if row.asked:
        asked = (
            f"asked for {plural(row.width, 'chunk')}, {hits}, {row.popped} popped, "
            f"boundary {row.boundary:,} tokens"
        )
    cells = ", ".join(
        f"{run.first:,} to {run.last:,} {CELLS[run.state].label}"
        if run.count > 1
        else f"{run.first:,} {CELLS[run.state].label}"
        for run in row.runs
    )
    parts = [head + (f", {badge}" if badge else ""), asked, *([row.veto] if row.veto else [])]
    return f"{'; '.join(parts)}. Chunks: {cells}."


def _marks(strip: Strip) -> Iterable[Mark]:
    named = [("local", strip.local), ("served", strip.answered), ("servable", strip.servable)]
    if strip.expected > max(strip.servable, strip.answered):
        named.append(("expected", strip.expected))
    places: dict[int, list[str]] = {}
    for name, token in named:
        places.setdefault(token, []).append(name)
    for line, (token, names) in enumerate(sorted(places.items())):
        met = {"served", "servable"} <= set(names)
        right = token > strip.tokens / 2
        # A lookup that answered nothing must not look like one that served.
        css = "local" if "local" in names else names[-1]
        yield Mark(
            css=f"{css} is-met" if met else css,
            token=token,
            x=percent(token, strip.tokens),
            text=f"{' = '.join(names)}: {plural(token, 'token')}",
            help=" ".join(HELP[f"{name}_mark"] for name in names),
            anchor="end" if right else "start",
            dx=-6 if right else 6,
            line=line,
        )


def _ticks(tokens: int) -> Iterable[Tick]:
    step = next(
        size
        for power in itertools.count()
        for size in (10**power, 2 * 10**power, 5 * 10**power)
        if tokens / size <= 8
    )
    places = [token for token in range(0, tokens, step) if tokens - token > step * 0.6]
    for index, token in enumerate(places):
        anchor = "start" if token == 0 else "middle"
        wide_only = index % 2 or tokens - token < 0.25 * tokens
        yield Tick(percent(token, tokens), f"{token:,}", anchor, "odd" if wide_only else "")
    yield Tick("100%", f"{tokens:,} tokens", "end", "")
