"""Take docs/screenshots: every page, both themes, both widths, from a seeded dashboard.

Usage: python scripts/screenshots.py [OUTPUT_FOLDER] [PAGE ...]
Needs the development environment and Chromium (KVLENS_TEST_CHROMIUM, or on the path).
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import httpx
from PIL import Image
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("dashboard", "helpers")]

from chromium import Complaints, executable, launched  # noqa: E402
from fleet import fleet, open_incident, send  # noqa: E402

from kvlens.dashboard.server import running  # noqa: E402
from kvlens.dashboard.settings import Settings  # noqa: E402

WIDTHS = {"1280": 1280, "390": 390}
MAX_HEIGHT = {"1280": 2200, "390": 2800}
"""Longer pages are cut: a list needs no second screen to be understood."""


def main() -> int:
    """Return the exit code."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "screenshots"
    wanted = set(sys.argv[2:])
    path = executable()
    if path is None:
        print("no chromium: apt-get install chromium, or set KVLENS_TEST_CHROMIUM")
        return 2
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, launched(path) as browser:
        empty = Settings(store=f"{folder}/empty.db", port=0)
        filled = Settings(store=f"{folder}/filled.db", port=0)
        with running(empty) as nothing, running(filled) as url:
            pages = {"empty": nothing + "/", **seeded(url)}
            for name, address in pages.items():
                if not wanted or name in wanted:
                    shoot(browser, name, address, output)
    total = sum(file.stat().st_size for file in output.glob("*.png"))
    print(f"{len(list(output.glob('*.png')))} files, {total / 1e6:.2f} MB in {output}")
    return 0


def seeded(url: str) -> dict[str, str]:
    """Fill the dashboard at ``url``; return the address of each page by name."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for info, records in fleet(time.time()):
            send(client, info, records)
        incident = open_incident(client)
        wide = client.get("/api/v1/requests", params={"cause": "store_gap"}).json()["requests"][0]
    return {
        "overview": url + "/",
        "engine": url + "/engines/inc-a1",
        "incidents": url + "/incidents",
        "incident": f"{url}/incidents/{incident}",
        "compare": url + "/compare",
        "cost": url + "/cost",
        "runbook": url + "/runbooks/zero_hit",
        "requests": url + "/requests",
        "request-lost": url + "/requests/cmpl-0113",
        "request-served": url + "/requests/cmpl-1003",
        "request-nine-groups": f"{url}/requests/{quote(wide['internal_request_id'], safe='')}",
    }


def shoot(browser: Browser, name: str, address: str, output: Path) -> None:
    """Take one page in both themes and at both widths; complaints of the browser are fatal."""
    for theme in ("light", "dark"):
        for label, width in WIDTHS.items():
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                color_scheme=theme,  # type: ignore[arg-type]
                reduced_motion="reduce",
            )
            page = context.new_page()
            complaints = Complaints()
            complaints.watch(page)
            page.goto(address)
            page.locator("#live[data-state=open]").wait_for()
            page.evaluate("document.fonts.ready")
            picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            picture = picture.crop((0, 0, width, min(picture.height, MAX_HEIGHT[label])))
            fewer_colours(picture.convert("RGB")).save(
                output / f"{name}-{theme}-{label}.png", optimize=True
            )
            context.close()
            if complaints.texts:
                raise SystemExit(f"{address}: {complaints.texts}")


def fewer_colours(picture: Image.Image) -> Image.Image:
    """Keep 256 colours exactly: flat pages need no more, at a third of the size.

    The commonest alone would be shades of grey, so half of them are the commonest
    saturated ones.
    """
    counted = sorted(picture.getcolors(1 << 24) or [], reverse=True)
    colours = [colour for _, colour in counted if isinstance(colour, tuple)]
    vivid = [colour for colour in colours if max(colour) - min(colour) > 60][:140]
    commonest = [colour for colour in colours if colour not in vivid][: 256 - len(vivid)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in (*commonest, *vivid) for channel in colour])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    raise SystemExit(main())
