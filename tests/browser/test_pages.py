"""Every page in both themes and at both widths: readable, in frame, usable by keyboard."""

import re
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from chromium import Complaints
from factory import engine
from fleet import fleet, hostile, open_incident, send
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

AUDIT = Path(__file__).with_name("audit.js").read_text()


@pytest.fixture
def paths(ingest: httpx.Client) -> list[str]:
    now = time.time()
    for info, records in fleet(now):
        send(ingest, info, records)
    incident = open_incident(ingest)
    wide = ingest.get("/api/v1/requests", params={"cause": "store_gap"}).json()["requests"][0]
    return [
        "/",
        "/incidents",
        f"/incidents/{incident}",
        "/requests",
        "/engines/inc-a1",
        "/requests/cmpl-0111",
        "/requests/cmpl-1003",
        "/requests/" + quote(wide["internal_request_id"], safe=""),
        "/requests?verdict=stalled",
        "/compare",
        "/cost",
        "/cost?range=7d",
        "/runbooks",
        "/runbooks/zero_hit",
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_can_be_read(
    chromium: Browser,
    dashboard: str,
    paths: list[str],
    complaints: Complaints,
    theme: str,
    width: int,
) -> None:
    context = chromium.new_context(
        base_url=dashboard,
        viewport={"width": width, "height": 844},
        color_scheme=theme,  # type: ignore[arg-type]
    )
    page = context.new_page()
    complaints.watch(page)
    for path in paths:
        page.goto(path)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path} scrolls sideways: {wide} px"
        assert page.evaluate(AUDIT) == [], path
        for link in page.get_by_role("navigation", name="Main").get_by_role("link").all():
            box = link.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width, f"{path}: {box}"
    context.close()


def test_theme_toggle_is_remembered(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto("/")
    light = page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("button", name="Switch between dark and light").click()
    dark = page.evaluate("getComputedStyle(document.body).color")
    assert dark != light
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).color") == dark


def test_keyboard_alone_reaches_content_and_walks_the_strip(page: Page, paths: list[str]) -> None:
    page.goto(paths[5])
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.get_by_role("group", name="Chunk strip").focus()
    readout = page.locator("[data-readout]")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("Group 0: popped: chunk 2")
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text("Group 1: popped: chunk 2")


def test_zoom_scrolls_inside_the_strip_only(page: Page, paths: list[str]) -> None:
    page.goto(paths[7])
    page.locator("[data-zoom-to='16']").click()
    inner = page.locator(".strip-scroll").evaluate("(e) => e.scrollWidth / e.clientWidth")
    assert inner > 10
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_filter_form_leads_to_a_deep_link(page: Page, paths: list[str]) -> None:
    page.goto(paths[3])
    page.get_by_label("Verdict").select_option("lost")
    page.get_by_label("Lost at least, tokens").fill("1500")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile(r"/requests\?verdict=lost&min_lost=1500$"))
    expect(page.locator("tbody tr").first).to_contain_text("lost")
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_label("Verdict")).to_have_value("")


def test_hostile_texts_run_nothing(page: Page, ingest: httpx.Client) -> None:
    info = engine(engine_id="<img src=x onerror=alert(1)>", started_at=time.time() - 60)
    record = hostile(info, time.time())
    send(ingest, info, [record])
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    for path in ("/", "/requests", "/requests/" + quote(record.internal_request_id, safe="")):
        page.goto(path)
        assert page.locator("main img").count() == 0
        assert page.locator("body script").count() == 0


def test_pages_are_complete_without_script(
    chromium: Browser, dashboard: str, paths: list[str]
) -> None:
    context = chromium.new_context(base_url=dashboard, java_script_enabled=False)
    page = context.new_page()
    page.goto(paths[5])
    expect(page.locator(".strip-row")).to_have_count(3)
    expect(page.get_by_text("vetoed here: raw hits 1, after pop 0").first).to_be_visible()
    expect(page.locator("#theme")).to_be_hidden()
    context.close()
