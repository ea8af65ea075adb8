"""The curve as SVG: classes only, so that a page's style sheet and theme decide the colours."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kvlens.dashboard.sizing.axes import Sizes, ratio_steps
from kvlens.dashboard.sizing.report import Sized, gib_text
from kvlens.dashboard.view.format import compact

_SAMPLES = 240
_NARROW = 500
"""Pixels up to which sizes are not written beside their marks."""


class Picture:
    """One drawing, ``width`` by ``height`` pixels."""

    def __init__(self, sized: Sized, width: int, height: int, ticks: int) -> None:
        self._sized = sized
        self._width, self._height = width, height
        self._left, self._right, self._top, self._bottom = 44.0, width - 16.0, 16.0, height - 46.0
        self._ticks = ticks
        self._sizes = Sizes.of(sized, self._left, self._right)
        self._ratios = ratio_steps(max(sized.said.ceiling.token_ratio, 1e-3))

    def svg(self) -> str:
        """The whole drawing."""
        said = self._sized.said
        label = (
            f"Share of prompt tokens served against tier size; an endless tier serves "
            f"{said.ceiling.token_ratio:.1%}"
        )
        parts = [
            *self._grid(),
            *self._gpu(),
            *self._curve(),
            *self._ceiling(),
            *self._marks(),
            *self._now(),
        ]
        return (
            f'<svg class="size-svg" viewBox="0 0 {self._width} {self._height}" role="img" '
            f'aria-label="{label}">{"".join(parts)}</svg>'
        )

    def _y(self, ratio: float) -> float:
        return self._bottom - (self._bottom - self._top) * ratio / self._ratios[-1]

    def _grid(self) -> Iterator[str]:
        digits = 0 if self._ratios[1] * 100 == round(self._ratios[1] * 100) else 1
        for ratio in self._ratios:
            y = self._y(ratio)
            yield _line("grid", self._left, y, self._right, y)
            yield _text("tick", self._left - 8, y + 4, f"{ratio * 100:.{digits}f} %", "end")
        gib = self._sized.memory.bytes_per_token is not None
        for value in self._sizes.ticks(self._ticks):
            x = self._sizes.at(value)
            yield _line("grid", x, self._bottom, x, self._bottom + 5)
            anchor = "end" if x > self._right - 20 else "middle"
            yield _text(
                "tick", x, self._bottom + 19, gib_text(value) if gib else compact(value), anchor
            )
        per = " per engine" if self._sized.said.engines > 1 else ""
        unit = f"tier size{per}" if gib else f"tier size{per}, {self._sized.unit}"
        yield _text("size-axis", self._right, self._height - 6, unit, "end")

    def _gpu(self) -> Iterator[str]:
        said = self._sized.said
        if said.question.gpu_tokens and said.gpu.token_ratio:
            y = self._y(said.gpu.token_ratio)
            yield (
                f'<rect class="gpu" x="{self._left:.1f}" y="{y:.1f}" '
                f'width="{self._right - self._left:.1f}" height="{self._bottom - y:.1f}"/>'
            )

    def _curve(self) -> Iterator[str]:
        said = self._sized.said
        points = [
            (self._sizes.x(size), self._y(said.point(size).token_ratio))
            for size in self._sizes.samples(_SAMPLES)
        ]
        points.append((self._right, points[-1][1]))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        first = points[0][0]
        yield (
            f'<polygon class="under" points="{first:.1f},{self._bottom:.1f} {line} '
            f'{self._right:.1f},{self._bottom:.1f}"/><polyline class="curve" points="{line}"/>'
        )

    def _ceiling(self) -> Iterator[str]:
        ratio = self._sized.said.ceiling.token_ratio
        y = self._y(ratio)
        yield _line("ceiling", self._left, y, self._right, y)
        yield _text("note", self._left + 6, y - 6, f"endless tier: {100 * ratio:.1f} %")
        if own := self._sized.said.gpu.token_ratio:
            name = "GPU's own cache" if self._width > _NARROW else "GPU"
            text = f"{name}: {100 * own:.1f} %"
            yield _text("note", self._left + 6, self._y(own) - 8, text)

    def _now(self) -> Iterator[str]:
        if (now := self._sized.now) is None:
            return
        x, share = self._sizes.x(now), self._sized.said.point(now).token_ratio
        yield _line("now", x, self._top, x, self._bottom)
        yield f'<circle class="dot now" cx="{x:.1f}" cy="{self._y(share):.1f}" r="4.5"/>'
        left = x > (self._left + self._right) / 2
        at = self._top + 36
        yield _text("note", x - 6 if left else x + 6, at, "now", "end" if left else "start")

    def _marks(self) -> Iterator[str]:
        said = self._sized.said
        if said.ceiling.block_ratio <= said.gpu.block_ratio:
            return
        for row, (share, blocks) in enumerate(said.reach):
            x, y = self._sizes.x(blocks), self._y(said.point(blocks).token_ratio)
            yield _line("mark", x, y, x, self._bottom)
            yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
            text = f"{100 * share:.0f} %"
            if self._width > _NARROW:
                text += f": {self._sized.size(blocks)}"
            left = x - 7.5 * len(text) > self._left
            at = self._bottom - 10 - 17 * (len(said.reach) - 1 - row)
            yield _text("mark-note", x - 6 if left else x + 6, at, text, "end" if left else "start")


def both(sized: Sized) -> str:
    """A wide drawing and a narrow one: the style sheet shows the one that fits."""
    return (
        f'<div class="size-wide">{Picture(sized, 960, 400, 10).svg()}</div>'
        f'<div class="size-narrow">{Picture(sized, 360, 300, 5).svg()}</div>'
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )
