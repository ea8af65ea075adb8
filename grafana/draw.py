"""Draw the boards from a Prometheus, without Grafana: the same panels, queries and places.

    python -m grafana.draw http://127.0.0.1:9090 FOLDER --start UNIX --end UNIX [--rate 1m]

One SVG per board. It shows whether a board reads well and what its queries return; fonts, colours
and tooltips are not Grafana's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from grafana import generate

UNIT: Final = 50
"""Pixels of a 24th of a board's width."""
ROW: Final = 34
"""Pixels of a grid row."""
POINTS: Final = 120
COLOURS: Final = (
    "#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#fa6400",
    "#1f60c4", "#8f3bb8", "#c0d8ff", "#96d98d", "#ffcb7d", "#e0b400", "#ff7383",
)  # fmt: skip
UNITS: Final = {"percentunit": ("%", 100.0), "s": (" s", 1.0), "Bps": (" B/s", 1.0),
                "reqps": (" req/s", 1.0), "short": ("", 1.0)}  # fmt: skip
Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Source:
    """A Prometheus and the time that is drawn; times are Unix seconds."""

    url: str
    start: float
    end: float
    rate: str

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """Series of an expression over the whole time."""
        variables = {"$__rate_interval": self.rate, "$__range": f"{self.end - self.start:.0f}s"}
        variables |= {f"${name}": ".*" for name in ("model", "instance", "engine", "group")}
        for name, value in variables.items():
            expr = expr.replace(name, value)
        step = max((self.end - self.start) / POINTS, 1.0)
        given = {"query": expr, "start": self.start, "end": self.end, "step": step}
        with urlopen(f"{self.url}/api/v1/query_range?{urlencode(given)}", timeout=60) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def number(value: float, unit: str) -> str:
    """A value as an axis or a stat shows it."""
    suffix, factor = UNITS.get(unit, ("", 1.0))
    value *= factor
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{suffix.strip()}"
    return f"{value:.3g}{suffix}"


def points(series: dict[str, Any]) -> Series:
    """Values that are numbers."""
    pairs = ((float(at), float(value)) for at, value in series["values"])
    return [(at, value) for at, value in pairs if abs(value) < float("inf")]


def legend(series: dict[str, Any], target: dict[str, Any]) -> str:
    """Grafana's ``{{label}}`` filled in."""
    text = str(target.get("legendFormat", ""))
    for name, value in series["metric"].items():
        text = text.replace("{{" + name + "}}", value)
    return "" if text == "__auto" else text


def lines(panel: dict[str, Any], source: Source, width: int, height: int) -> Iterator[str]:
    """Lines and their names."""
    found = [
        (legend(series, target), drawn)
        for target in panel["targets"]
        for series in source.ask(target["expr"])
        if (drawn := points(series))
    ]
    found.sort(key=lambda item: -max(value for _, value in item[1]))
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    top = max((value for _, drawn in found for _, value in drawn), default=0.0) or 1.0
    left, base = 62, height - 40
    scale = (width - left - 8) / (source.end - source.start)
    for part in (0.0, 0.5, 1.0):
        y = base - part * (base - 30)
        yield f'<line x1="{left}" x2="{width - 8}" y1="{y}" y2="{y}" class="grid"/>'
        yield f'<text x="{left - 6}" y="{y + 4}" class="axis">{number(part * top, unit)}</text>'
    at = 8.0
    for index, (name, drawn) in enumerate(found):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(
            f"{left + (when - source.start) * scale:.1f},{base - value / top * (base - 30):.1f}"
            for when, value in drawn
        )
        yield f'<polyline points="{path}" stroke="{colour}"/>'
        if at + 7 * len(name) < width:
            yield f'<text x="{at}" y="{height - 10}" fill="{colour}">■ {escape(name)}</text>'
        at += 7 * len(name) + 26


def stat(panel: dict[str, Any], source: Source, width: int, height: int) -> Iterator[str]:
    """The last value, large."""
    series = source.ask(panel["targets"][0]["expr"])
    last = points(series[0])[-1][1] if series and points(series[0]) else None
    defaults = panel["fieldConfig"]["defaults"]
    red = defaults["thresholds"]["steps"][-1]
    over = last is not None and red.get("value") is not None and last >= red["value"]
    text = "No data" if last is None else number(last, defaults.get("unit", "short"))
    yield (f'<text x="{width / 2}" y="{height / 2 + 24}" class="stat" '
           f'fill="{"#f2495c" if over else "#73bf69"}">{text}</text>')  # fmt: skip


def heat(panel: dict[str, Any], source: Source, width: int, height: int) -> Iterator[str]:
    """Buckets over time, the fuller the stronger."""
    found = sorted(source.ask(panel["targets"][0]["expr"]), key=lambda s: float(s["metric"]["le"]))
    cells: dict[tuple[int, float], float] = {}
    below: dict[float, float] = {}
    for row, series in enumerate(found):
        for when, value in points(series):
            cells[row, when] = max(value - below.get(when, 0.0), 0.0)
            below[when] = value
    most = max(cells.values(), default=0.0) or 1.0
    left, tall = 62, (height - 50) / max(len(found), 1)
    wide = (width - left - 8) / POINTS
    for row, series in enumerate(found):
        y = height - 20 - (row + 1) * tall
        if row % 3 == 0:
            edge = series["metric"]["le"]
            yield f'<text x="{left - 6}" y="{y + tall}" class="axis">{edge} s</text>'
    for (row, when), value in cells.items():
        if value:
            x = left + (when - source.start) / (source.end - source.start) * (width - left - 8)
            y = height - 20 - (row + 1) * tall
            yield (f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
                   f'fill="#ff9830" opacity="{0.2 + 0.8 * value / most:.2f}"/>')  # fmt: skip


def rows(panel: dict[str, Any], source: Source, width: int, height: int) -> Iterator[str]:
    """A table of labels."""
    shown = panel["transformations"][0]["options"]
    titles = {name: shown["renameByName"][name] for name in
              sorted(shown["indexByName"], key=shown["indexByName"].__getitem__)}  # fmt: skip
    y = 48
    for series in source.ask(panel["targets"][0]["expr"])[: (height - 50) // 20]:
        cells = [f"{title}: {series['metric'].get(name, '')}" for name, title in titles.items()]
        text = escape("   ".join(cells))[: width // 6]
        yield f'<text x="10" y="{y}">{text}</text>'
        y += 20


KINDS: Final = {"timeseries": lines, "stat": stat, "heatmap": heat, "table": rows}


def draw(board: dict[str, Any], source: Source) -> str:
    """SVG of a board."""
    parts, bottom = [], 0
    for panel in board["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * UNIT, place["y"] * ROW + 40
        width, height = place["w"] * UNIT - 6, place["h"] * ROW - 6
        bottom = max(bottom, y + height)
        title = escape(panel["title"])
        parts.append(f'<svg x="{x}" y="{y}" width="{width}" height="{height}">')
        if panel["type"] == "row":
            parts.append(f'<text x="6" y="20" class="row">{title}</text>')
        else:
            parts.append('<rect width="100%" height="100%" class="panel"/>')
            parts.append(f'<text x="10" y="20" class="title">{title}</text>')
            parts += KINDS[panel["type"]](panel, source, width, height)
        parts.append("</svg>")
    style = (
        "svg{fill:#ccccdc}text{font:11px sans-serif}.axis{text-anchor:end;fill:#8e8e9a}"
        ".title{font-size:13px;font-weight:600}.row{font-size:15px}.panel{fill:#181b1f;"
        "stroke:#2b2e35}.grid{stroke:#2b2e35}polyline{fill:none;stroke-width:1.5}"
        ".stat{font-size:30px;text-anchor:middle}"
    )
    head = f"{escape(board['title'])} (drawn by grafana/draw.py, not by Grafana)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{24 * UNIT}" height="{bottom + 10}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#111217"/>'
        f'<text x="8" y="26" class="row">{head}</text>{"".join(parts)}</svg>\n'
    )


def main(arguments: list[str] | None = None) -> int:
    """Draw all boards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prometheus", help="address")
    parser.add_argument("folder", type=Path, help="for kvlens-*.svg")
    parser.add_argument("--start", type=float, required=True, help="Unix seconds")
    parser.add_argument("--end", type=float, required=True, help="Unix seconds")
    parser.add_argument("--rate", default="1m", help="window of rates")
    given = parser.parse_args(arguments)
    source = Source(given.prometheus.rstrip("/"), given.start, given.end, given.rate)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, module in generate.BOARDS.items():
        board = json.loads(generate.encode(module.build()))
        (given.folder / f"kvlens-{name}.svg").write_text(draw(board, source), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
