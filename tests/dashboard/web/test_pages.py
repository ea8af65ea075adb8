"""The pages over HTTP, on the real server, filled through real ingest."""

import csv
import io
import json
import re
import time
from urllib.parse import quote

import httpx
import pytest
from factory import cold_record, engine, lost_record, served_record
from fleet import fleet, hostile, open_incident, send
from gallery import gap_record, nine_group_engine
from markup import Page

from kvlens.dashboard.web.assets import assets, version


@pytest.fixture
def filled(client: httpx.Client) -> httpx.Client:
    for info, records in fleet(time.time()):
        send(client, info, records)
    open_incident(client)
    return client


def page(client: httpx.Client, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, answer.text[:400]
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    html = Page(answer.text)
    # The policy forbids these: a page that has one is broken in a browser.
    assert not html.all("style")
    assert "javascript:" not in answer.text
    for tag in html.all("*"):
        assert not [name for name in tag.attrs if name == "style" or name.startswith("on")], tag
    assert all("src" in tag.attrs for tag in html.all("script"))
    assert len(html.all("h1")) == 1
    return html


@pytest.mark.parametrize("path", ["/", "/incidents", "/requests"])
def test_empty_pages_say_what_to_do(client: httpx.Client, path: str) -> None:
    html = page(client, path)
    assert "No engine has reported yet" in html
    assert "kvlens.connector" in html
    assert f"KVLENS_OTLP_ENDPOINT={str(client.base_url).rstrip('/')}" in html


def test_overview_is_worst_first(filled: httpx.Client) -> None:
    html = page(filled, "/")
    assert "1 critical incident open" in html
    engines = [str(tag["title"]) for tag in html.all('[title^="incarnation "]')]
    assert engines[0] == "incarnation inc-a1"
    assert engines[-1] == "incarnation inc-c1"
    shown = [title.partition(" with")[0].partition(" that")[0] for title in html.headings()]
    order = [shown.index("Open incidents"), shown.index("Engines")]
    order += [n for n, title in enumerate(shown) if title.startswith("Last requests")]
    assert len(order) == 3
    assert order == sorted(order)
    assert "cause: drafter fallback (certain)" in html


def test_incident_page_has_verdict_evidence_next_step_and_requests(filled: httpx.Client) -> None:
    html = page(filled, f"/incidents/{open_incident(filled)}")
    for text in ("Next step", "Evidence", "annotated drafter", "Incident opened", "Affected"):
        assert text in html
    assert len(html.links("/requests/cmpl-")) == 14


def test_closed_incidents_are_listed_apart(filled: httpx.Client) -> None:
    html = page(filled, "/incidents")
    titles = html.headings()
    assert titles.index("Open") < titles.index("Closed")
    assert "engine gone" in html.section("Closed")
    assert "engine gone" not in html.section("Open")


def test_engine_page_names_the_fingerprint(filled: httpx.Client) -> None:
    html = page(filled, "/engines/inc-a1")
    assert "fingerprint of the drafter fallback" in html
    assert "293 chunks" in html
    healthy = page(filled, "/engines/inc-b1?range=7d")
    assert "fingerprint" not in healthy
    assert "p95" in healthy


def test_engine_page_says_whether_block_hashes_look_ahead(client: httpx.Client) -> None:
    newer = engine("node-n:0", "inc-n1", affected=False)
    for group in newer.layout.groups:
        group.hash_lookahead = 1
    for info in (engine(), newer):
        send(client, info, [served_record(0, info)])
    assert re.search(
        r"Lookahead hashes</dt><dd>on, 1 token after each block<",
        client.get("/engines/inc-n1").text,
    )
    assert re.search(r"Lookahead hashes</dt><dd>off<", client.get("/engines/inc-a1").text)


def test_engine_page_has_a_line_per_group_and_tells_the_size_of_the_tier(
    filled: httpx.Client,
) -> None:
    html = page(filled, "/engines/inc-b1")
    series = html.section("Groups over time")
    assert len(series.all("th[scope=row]")) == 3
    assert len(series.all("polyline")) >= 3 * 5
    assert re.search(r"resident: highest [0-9]+ chunks", str(series.tag))
    assert "Reload p99" in series
    sizing = html.section("Pool sizing")
    assert "293 chunks now" in sizing
    assert "would serve 95 % of what comes back" in sizing


def test_incident_is_compared_with_what_was_before(filled: httpx.Client) -> None:
    html = page(filled, f"/incidents/{open_incident(filled)}")
    before = html.section("Before and during")
    assert "12 requests in the day before" in before
    assert before.row("Requests that lost all")[0].get_text().startswith("0 %")
    assert html.links("/runbooks/zero_hit")


def test_a_later_start_is_compared_with_the_one_before(filled: httpx.Client) -> None:
    closed = filled.get("/api/v1/incidents", params={"state": "closed"}).json()["incidents"]
    one = next(item for item in closed if item["incarnation_id"] == "inc-c1")
    assert "Against the start before" not in page(filled, f"/incidents/{one['id']}")
    again = engine("node-a:0", "inc-a2", started_at=time.time())
    send(filled, again, [lost_record(i, again, finish=time.time() + i) for i in range(3)])
    newest = open_incident(filled, of="inc-a2")
    assert "Against the start before" in page(filled, f"/incidents/{newest}")


def test_what_people_did_stands_on_the_incident(filled: httpx.Client) -> None:
    incident = open_incident(filled)
    assert "nobody looks after it yet" in page(filled, f"/incidents/{incident}")
    for verb, body in (
        ("acknowledge", {"name": "ann", "text": "on it <b>"}),
        ("silence", {"name": "ben", "seconds": 3600}),
    ):
        answer = filled.post(f"/api/v1/incidents/{incident}/{verb}", json=body)
        assert answer.status_code == 200, answer.text
    html = page(filled, f"/incidents/{incident}")
    assert "acknowledged by ann" in html
    assert "by ben" in html
    assert "on it <b>" in html


def test_two_configurations_side_by_side(filled: httpx.Client) -> None:
    html = page(filled, "/compare")
    assert "vLLM 0.32.0, corrected" in html
    assert "vLLM 0.29.0, stock" in html
    served = html.row("Served of expected")[0]
    assert "better" in served["class"]
    assert served.get_text().startswith("100 %")
    (swapped,) = [tag["href"] for tag in html.all("a") if tag.get_text().startswith("Swap")]
    served = page(filled, str(swapped)).row("Served of expected")[0]
    assert "worse" in served["class"]
    assert served.get_text().startswith("0 %")
    assert "There is nothing to compare yet" not in page(filled, "/compare?a=nonsense&b=no")


def test_one_configuration_cannot_be_compared(client: httpx.Client) -> None:
    send(client, engine(), [cold_record(1)])
    assert "There is nothing to compare yet" in page(client, "/compare")


def test_cost_by_cause_and_engine(filled: httpx.Client) -> None:
    html = page(filled, "/cost")
    causes = html.section("Lost tokens by cause").text
    assert causes.index("drafter fallback") < causes.index("store gap")
    engines = str(html.one('[aria-labelledby="engines-title"]'))
    assert engines.index("inc-a1") < engines.index("inc-b1")
    hour = page(filled, "/cost?range=1h")
    assert hour.links("/engines/inc-a1")
    assert not hour.links("/engines/inc-c1")  # it ended half a day ago


def test_nothing_lost_costs_nothing(client: httpx.Client) -> None:
    info = engine(affected=False)
    send(client, info, [served_record(1, info)])
    html = page(client, "/cost")
    assert "Nothing was lost in this range" in html
    values = [tag for tag in html.all("dd.value") if tag.get_text().strip().startswith("0 s")]
    assert values
    assert all(tag["class"] == ["value"] for tag in values)


def test_a_request_is_a_waterfall_of_its_steps(filled: httpx.Client) -> None:
    html = page(filled, "/requests/cmpl-1003")
    falls = html.section("Waterfall")
    steps = falls.texts("th[scope=row]")
    order = [steps.index(step) for step in ("Waiting", "Lookup", "Load", "Compute")]
    assert order == sorted(order)
    assert "12 ms copying" in falls


def test_exports_follow_the_filters(filled: httpx.Client) -> None:
    html = page(filled, "/requests?verdict=lost&engine=inc-a1")
    links = html.links("/api/v1/export")
    assert len(links) == 2
    table = filled.get(links[0])
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(table.text)))
    lines = filled.get(links[1]).text.splitlines()
    assert len(rows) == len(lines) == 14
    assert {row["verdict"] for row in rows} == {"lost"}
    assert rows[0]["lost_tokens"] == str(json.loads(lines[0])["lost_tokens"])


def test_a_cell_never_becomes_a_formula(client: httpx.Client) -> None:
    info = engine(model="=HYPERLINK(1)")
    send(client, info, [cold_record(1, info)])
    (row,) = csv.DictReader(io.StringIO(client.get("/api/v1/export?format=csv").text))
    assert row["model"] == "'=HYPERLINK(1)"


def test_request_page_shows_strip_and_numbers_without_script(filled: httpx.Client) -> None:
    html = page(filled, "/requests/cmpl-0113")
    assert "vetoed here: raw hits 1, after pop 0" in html
    assert len(html.all(".strip-row")) == 3
    assert "servable: 1,024 tokens" in str(html.tag)
    hidden = html.texts(".visually-hidden")
    assert [text for text in hidden if text.startswith("Group 1, sliding window")]


def test_another_lookup_can_be_put_on_the_strip(client: httpx.Client) -> None:
    info = nine_group_engine(engine())
    record = gap_record(served_record(7, info), time.time())
    send(client, info, [record])
    path = f"/requests/{quote(record.internal_request_id, safe='')}"
    assert "decisive lookup" in page(client, path)
    assert "another lookup" in page(client, path + "?lookup=0")
    assert "decisive lookup" in page(client, path + "?lookup=99")
    assert "repeated 312 times" in page(client, path)


def test_filters_narrow_and_pages_follow_the_cursor(filled: httpx.Client) -> None:
    lost = page(filled, "/requests?verdict=lost&min_lost=&engine=inc-a1")
    assert len(lost.all("th[scope=row]")) == 14
    assert lost.all('option[value="lost"][selected]')
    first = page(filled, "/requests")
    second = page(filled, str(first.one("a[rel=next]")["href"]))
    shown = set(first.links("/requests/cmpl-")), set(second.links("/requests/cmpl-"))
    assert all(shown)
    assert not shown[0] & shown[1]
    assert "Newest" in second.texts("a")
    assert "No request matches" in page(filled, "/requests?cause=hash_seed")


def test_wrong_filters_are_named(filled: httpx.Client) -> None:
    html = page(filled, "/requests?verdict=lots&sort=size&cursor=nonsense", status=400)
    assert "verdict is one of" in html
    assert "sort is one of newest, oldest, lost, served, expected; got 'size'" in html
    assert "cursor: not a cursor" in html


def test_the_list_can_be_sorted(filled: httpx.Client) -> None:
    def sorting(html: Page, text: str) -> str | None:
        (head,) = [tag for tag in html.all("th") if tag.get_text().strip() == text]
        found = head.get("aria-sort")
        return None if found is None else str(found)

    newest = page(filled, "/requests?engine=inc-a1")
    assert sorting(newest, "Finished") == "descending"
    oldest = page(filled, newest.link("Finished"))
    assert sorting(oldest, "Finished") == "ascending"
    assert oldest.link("Finished") == "/requests?engine=inc-a1"
    by_loss = page(filled, oldest.link("Lost"))
    assert sorting(by_loss, "Lost") == "descending"
    assert sorting(by_loss, "Finished") is None
    assert by_loss.one('option[value="lost"][selected]').get_text() == "most tokens lost first"
    assert "those that have none are not listed" in by_loss
    assert "sort=lost" in by_loss.links("/api/v1/export")[0]
    lost = [int(text.split()[0].replace(",", "")) for text in by_loss.texts("td.r.bad")]
    assert lost
    assert lost == sorted(lost, reverse=True)
    (clear,) = [tag for tag in by_loss.all("a") if tag.get_text().startswith("Clear")]
    assert clear["href"] == "/requests?sort=lost"


@pytest.mark.parametrize("kind", ["engines", "incidents", "requests"])
def test_unknown_things_are_a_page_too(client: httpx.Client, kind: str) -> None:
    assert f"No such {kind[:-1]}" in page(client, f"/{kind}/%3Cb%3Enone", status=404)


def test_an_unknown_address_is_a_page_for_people_and_json_for_programs(
    client: httpx.Client,
) -> None:
    answer = client.get("/nosuch", headers={"accept": "text/html"})
    assert answer.status_code == 404
    assert "No such page" in answer.text
    for path in ("/nosuch", "/api/v1/requests/nosuch"):
        answer = client.get(path, headers={"accept": "*/*"})
        assert (answer.status_code, "detail" in answer.json()) == (404, True)


def test_texts_from_outside_stay_text(client: httpx.Client) -> None:
    now = time.time()
    info = engine(engine_id="<b>bold</b>", incarnation_id="a/b?<i>", model="<u>m</u>")
    record = hostile(info, now)
    send(client, info, [record, *(lost_record(i, info, finish=now - 9 + i) for i in range(3))])
    paths = ["/", "/requests", "/incidents", "/engines/a%2Fb%3F%3Ci%3E"]
    paths.append("/requests/" + quote(record.internal_request_id, safe=""))
    paths.append("/incidents/" + quote(open_incident(client), safe=""))
    for path in paths:
        html = page(client, path)
        assert not html.all("img, u")
        assert "bold" not in html.texts("b")
        assert not [tag for tag in html.all("i") if not tag.attrs]
        assert all(not tag.get_text() for tag in html.all("script"))
    assert "<script>alert(1)" in page(client, paths[4])


def test_record_without_lookups_or_engine_details(client: httpx.Client) -> None:
    info = engine()
    bare = cold_record(1, info)
    bare.lookups, bare.stores, bare.summary = [], [], ""
    send(client, info, [bare])
    html = page(client, "/requests/cmpl-0001")
    assert "nothing to draw" in html
    assert "never computed before" in html


def test_static_files_are_cached_by_version_and_nothing_else_is_served(
    client: httpx.Client,
) -> None:
    good = client.get(f"/static/{version()}/css/tokens.css")
    assert good.headers["content-type"].startswith("text/css")
    assert "immutable" in good.headers["cache-control"]
    assert client.get("/static/old/css/tokens.css").headers["cache-control"] == "no-cache"
    for path in ("..%2froutes.py", "%2e%2e%2froutes.py", "css", "nope.css"):
        assert client.get(f"/static/{version()}/{path}").status_code == 404
    assert client.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


def test_every_file_that_a_page_names_exists(filled: httpx.Client) -> None:
    for path in ("/", "/requests/cmpl-0113"):
        named = re.findall(r"/static/[0-9a-f]+/([^\"#]+)", str(page(filled, path).tag))
        assert named
        assert set(named) <= assets().keys()


def test_no_style_or_script_fetches_from_elsewhere() -> None:
    for path, asset in assets().items():
        if path.endswith((".css", ".js")):
            assert b"http://" not in asset.body, path
            assert b"https://" not in asset.body, path


def test_vendored_fonts_come_with_their_licences() -> None:
    notes = assets()["vendor/README.md"].body.decode()
    for path in assets():
        if path.endswith(".woff2"):
            folder = path.split("/")[1]
            assert f"`{folder}/`" in notes
            assert f"vendor/{folder}/LICENSE" in assets()
