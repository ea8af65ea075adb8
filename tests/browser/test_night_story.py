"""Traffic turns bad; the page shows it by itself; three clicks lead to the lost chunk."""

import re
import time

import httpx
import pytest
from factory import cold_record, engine
from fleet import fleet, lost_run, open_incident, send
from playwright.sync_api import BrowserContext, Page, expect

pytestmark = pytest.mark.browser


def test_incident_appears_without_reload_and_leads_to_the_strip(
    page: Page, ingest: httpx.Client
) -> None:
    now = time.time()
    info = engine(started_at=now - 600)
    page.goto("/")
    expect(page.get_by_role("heading", level=1)).to_have_text("No engine has reported yet")
    expect(page.locator("#live")).to_have_text("live")
    page.evaluate("window.sameDocument = true")

    send(ingest, info, [cold_record(1, info, finish=now - 300)])
    expect(page.get_by_role("heading", level=1)).to_have_text("No incident is open")
    send(ingest, info, lost_run(info, now, number=3))
    expect(page.get_by_role("heading", level=1)).to_have_text("1 critical incident open")
    expect(page.locator("#announce")).to_contain_text("New critical incident on node-a:0")
    expect(page.locator(".nav .pill")).to_contain_text("1")
    assert page.evaluate("window.sameDocument") is True

    page.get_by_role("link", name="Every offload hit is lost").click()
    verdict = page.get_by_label("Verdict")
    expect(verdict).to_contain_text("Drafter fallback. No KV group is annotated")
    expect(verdict).to_contain_text("Next step")
    expect(verdict.get_by_role("row", name="annotated drafter groups")).to_contain_text("none")

    page.get_by_role("link", name="cmpl-0101").click()
    expect(page).to_have_title("Request cmpl-0101 · kvlens")
    vetoing = page.locator(".strip-row.is-veto")
    expect(vetoing).to_have_count(1)
    expect(vetoing).to_contain_text("1 · sliding window")
    expect(vetoing).to_contain_text("vetoed here: raw hits 1, after pop 0")
    expect(vetoing.locator("rect.cell-popped title, g:has(rect.cell-popped) title")).to_have_text(
        "popped: chunk 1, tokens 512 to 1,023. "
        "Hit, then given up: a drafter's last chunk is volatile."
    )
    boundaries = page.locator(".strip-head").get_by_role("img")
    expect(boundaries).to_have_attribute(
        "aria-label",
        "Boundaries, in tokens from the prompt's start: local = served: 0 tokens; "
        "servable: 1,024 tokens",
    )
    expect(page.get_by_text("Group 1, sliding window, 512 tokens per chunk")).to_have_count(1)


def test_recovery_closes_the_incident_on_the_open_page(page: Page, ingest: httpx.Client) -> None:
    now = time.time()
    info = engine(started_at=now - 600)
    send(ingest, info, lost_run(info, now, number=3))
    page.goto("/incidents")
    open_panel = page.locator('[data-live="open"]')
    expect(open_panel).to_contain_text("Every offload hit is lost")
    newer = engine(incarnation_id="inc-a2", affected=False, started_at=now)
    send(ingest, newer, [cold_record(1, newer, finish=now + 1)])
    expect(open_panel).to_contain_text("Nothing is wrong")
    expect(page.locator('[data-live="closed"]')).to_contain_text("engine gone")


def test_news_reaches_a_page_that_does_not_list_incidents(page: Page, ingest: httpx.Client) -> None:
    now = time.time()
    info = engine(started_at=now - 600)
    send(ingest, info, [cold_record(1, info, finish=now - 300)])
    page.goto("/requests/cmpl-0001")
    expect(page.locator("#live")).to_have_text("live")
    send(ingest, info, lost_run(info, now, number=3))
    toast = page.locator("#toast")
    expect(toast).to_contain_text("New critical incident")
    toast.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Every offload hit is lost")
    expect(page.locator("#live")).to_have_text("live")
    # The stream repeats open incidents to each new page: known ones are no news.
    expect(page.locator("#toast")).to_be_hidden()


def test_acknowledging_silencing_and_noting_show_on_every_open_page(
    page: Page, context: BrowserContext, ingest: httpx.Client
) -> None:
    now = time.time()
    info = engine(started_at=now - 600)
    send(ingest, info, lost_run(info, now, number=3))
    address = f"/incidents/{open_incident(ingest)}"
    page.goto(address)
    other = context.new_page()
    other.goto(address)
    expect(other.locator("#live")).to_have_text("live")

    page.get_by_role("button", name="Add note").click()
    expect(page.get_by_role("alert")).to_have_text("Write the note first.")
    page.get_by_label("Your name").fill("ann")
    page.get_by_label("Note").fill("drafter fallback, rolling out 0.30")
    page.get_by_role("button", name="Acknowledge").focus()
    page.keyboard.press("Enter")
    for looking in (page, other):
        handling = looking.locator('[data-live="handling"]')
        expect(handling).to_contain_text("acknowledged by ann")
        expect(handling).to_contain_text("drafter fallback, rolling out 0.30")
    page.get_by_label("Silence for").select_option("1 day")
    page.get_by_role("button", name="Silence", exact=True).click()
    expect(other.locator('[data-live="handling"]')).to_contain_text("silenced until")
    page.get_by_role("button", name="Take back").click()
    expect(other.locator('[data-live="handling"]')).to_contain_text("nobody looks after it yet")
    page.reload()
    expect(page.get_by_label("Your name")).to_have_value("ann")


def test_comparing_two_versions_is_a_deep_link(page: Page, ingest: httpx.Client) -> None:
    for info, records in fleet(time.time()):
        send(ingest, info, records)
    page.goto("/")
    page.get_by_role("link", name="Compare").click()
    expect(page.locator("table.versus")).to_contain_text("vLLM 0.29.0, stock")
    page.get_by_label("Against").select_option(index=0)
    page.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?a=.+&b=.+"))
    expect(page.locator("table.versus tbody tr")).to_have_count(9)
