"""The picture as one file that needs nothing else, for whoever buys the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvlens.dashboard.sizing import picture
from kvlens.dashboard.sizing.report import Sized
from kvlens.dashboard.view.format import compact
from kvlens.telemetry import __version__

_WEB = Path(__file__).resolve().parent.parent / "web"


def standalone(sized: Sized) -> str:
    """An HTML page with all in it; its theme is the reader's."""
    pages = Environment(
        loader=FileSystemLoader(_WEB / "templates"), autoescape=True, undefined=StrictUndefined
    )
    sheets = [_WEB / "static" / "css" / name for name in ("sizing.css", "sizing-page.css")]
    return pages.get_template("sizing_file.html").render(
        version=__version__,
        css=Markup("\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)),
        **shown(sized),
    )


def shown(sized: Sized) -> dict[str, Any]:
    """What the templates show of a sizing."""
    said = sized.said
    return {
        "sized": sized,
        "said": said,
        "headline": headline(sized).replace(" %", "\N{NO-BREAK SPACE}%"),
        "picture": Markup(picture.both(sized)),
        "reach": [(share, sized.size(blocks), said.point(blocks)) for share, blocks in said.reach],
        "told": "Memory"
        if sized.memory.bytes_per_token
        else "Slots"
        if sized.memory.chunks_per_token
        else "",
        "memory": sized.memory.bytes_per_token is not None,
        "worth": said.ceiling.block_ratio > said.gpu.block_ratio,
        "share": lambda ratio: f"{100 * ratio:.1f}\N{NO-BREAK SPACE}%",
        "short": compact,
    }


def headline(sized: Sized) -> str:
    """The answer in one sentence."""
    said = sized.said
    if said.ceiling.block_ratio <= said.gpu.block_ratio:
        return (
            "A tier can add nothing to this traffic: nothing comes back that is not there already."
        )
    blocks = said.reach[1].blocks
    added = 100 * (said.point(blocks).token_ratio - said.gpu.token_ratio)
    of = sized.size(blocks) + (f" on each of {said.engines} engines" if said.engines > 1 else "")
    what = f"A tier of {of} serves 95 % of what any tier could: "
    if said.gpu.token_ratio:
        own = 100 * said.gpu.token_ratio
        return f"{what}{added:.1f} % of all prompt tokens, beside the GPU's own {own:.1f} %."
    return f"{what}{added:.1f} % of all prompt tokens."
