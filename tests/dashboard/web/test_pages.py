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

from kvlens.dashboard.web.assets import assets, version


@pytest.fixture
def filled(client: httpx.Client) -> httpx.Client:
    for info, records in fleet(time.time()):
        send(client, info, records)
    open_incident(client)
    return client


def page(client: httpx.Client, path: str, status: int = 200) -> str:
    answer = client.get(path)
    assert answer.status_code == status, answer.text[:400]
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    html = answer.text
    # The policy forbids these: a page that has one is broken in a browser.
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|javascript:", html)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    assert html.count("<h1") == 1
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
    engines = re.findall(r'title="incarnation ([^"]+)"', html)
    assert engines[0] == "inc-a1"
    assert engines[-1] == "inc-c1"
    assert html.index("Open incidents") < html.index(">Engines<") < html.index("Last requests")
    assert "cause: drafter fallback (certain)" in html


def test_incident_page_has_verdict_evidence_next_step_and_requests(filled: httpx.Client) -> None:
    html = page(filled, f"/incidents/{open_incident(filled)}")
    for text in ("Next step", "Evidence", "annotated drafter", "Incident opened", "Affected"):
        assert text in html
    assert len(re.findall(r'href="/requests/cmpl-', html)) == 14


def test_closed_incidents_are_listed_apart(filled: httpx.Client) -> None:
    html = page(filled, "/incidents")
    assert html.index("open-title") < html.index("closed-title")
    assert "engine gone" in html


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
        r"Lookahead hashes</dt><dd>on, 1 token after each block<", page(client, "/engines/inc-n1")
    )
    assert re.search(r"Lookahead hashes</dt><dd>off<", page(client, "/engines/inc-a1"))


def test_engine_page_has_a_line_per_group_and_tells_the_size_of_the_tier(
    filled: httpx.Client,
) -> None:
    html = page(filled, "/engines/inc-b1")
    series = html[html.index("Groups over time") : html.index("Pool sizing")]
    assert series.count('<th scope="row">') == 3
    assert series.count("<polyline") >= 3 * 5
    assert re.search(r"resident: highest [0-9]+ chunks", series)
    assert "Reload p99" in series
    sizing = html[html.index("Pool sizing") : html.index("KV-cache groups</h2>")]
    assert "293 chunks now" in sizing
    assert "would serve 95 % of what comes back" in sizing


def test_incident_is_compared_with_what_was_before(filled: httpx.Client) -> None:
    html = page(filled, f"/incidents/{open_incident(filled)}")
    before = html[html.index("Before and during") : html.index("Handling")]
    assert "12 requests in the day before" in before
    assert re.search(r"Requests that lost all</th>\s*<td[^>]*>0 %", before)
    assert 'href="/runbooks/zero_hit"' in html


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
    assert "on it &lt;b&gt;" in html


def test_two_configurations_side_by_side(filled: httpx.Client) -> None:
    html = page(filled, "/compare")
    assert "vLLM 0.32.0, corrected" in html
    assert "vLLM 0.29.0, stock" in html
    assert re.search(r'Served of expected</th>\s*<td class="r better">100 %', html)
    swapped = re.search(r'href="(/compare\?a=[^"]+)">Swap', html)
    assert swapped is not None
    turned = page(filled, swapped.group(1).replace("&amp;", "&"))
    assert re.search(r'Served of expected</th>\s*<td class="r worse">0 %', turned)
    assert "There is nothing to compare yet" not in page(filled, "/compare?a=nonsense&b=no")


def test_one_configuration_cannot_be_compared(client: httpx.Client) -> None:
    send(client, engine(), [cold_record(1)])
    assert "There is nothing to compare yet" in page(client, "/compare")


def test_cost_by_cause_and_engine(filled: httpx.Client) -> None:
    html = page(filled, "/cost")
    causes = html[html.index("Lost tokens by cause") : html.index("How to read this")]
    assert causes.index("drafter fallback") < causes.index("store gap")
    engines = html[html.index('id="engines-title"') :]
    assert engines.index("inc-a1") < engines.index("inc-b1")
    hour = page(filled, "/cost?range=1h")
    assert "inc-a1" in hour
    assert "inc-c1" not in hour  # it ended half a day ago


def test_nothing_lost_costs_nothing(client: httpx.Client) -> None:
    info = engine(affected=False)
    send(client, info, [served_record(1, info)])
    html = page(client, "/cost")
    assert "Nothing was lost in this range" in html
    assert re.search(r'<dd class="value ">0 s', html)


def test_a_request_is_a_waterfall_of_its_steps(filled: httpx.Client) -> None:
    html = page(filled, "/requests/cmpl-1003")
    falls = html[html.index("Waterfall") : html.index("Lookups")]
    steps = [falls.index(f"</i>{step}</th>") for step in ("Waiting", "Lookup", "Load", "Compute")]
    assert steps == sorted(steps)
    assert "12 ms copying" in falls


def test_exports_follow_the_filters(filled: httpx.Client) -> None:
    html = page(filled, "/requests?verdict=lost&engine=inc-a1")
    links = re.findall(r'href="(/api/v1/export[^"]+)"', html)
    assert len(links) == 2
    table = filled.get(links[0].replace("&amp;", "&"))
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(table.text)))
    lines = filled.get(links[1].replace("&amp;", "&")).text.splitlines()
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
    assert html.count('class="strip-row') == 3
    assert "servable: 1,024 tokens" in html
    assert 'class="visually-hidden">Group 1, sliding window' in html


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
    assert lost.count('<th scope="row"') == 14
    assert '<option value="lost" selected>' in lost
    first = page(filled, "/requests")
    following = re.search(r'rel="next" href="([^"]+)"', first)
    assert following is not None
    second = page(filled, following.group(1).replace("&amp;", "&"))
    pattern = r'href="/requests/(cmpl-[^"]+)"'
    assert not set(re.findall(pattern, first)) & set(re.findall(pattern, second))
    assert "Newest</a>" in second
    assert "No request matches" in page(filled, "/requests?cause=hash_seed")


def test_wrong_filters_are_named(filled: httpx.Client) -> None:
    html = page(filled, "/requests?verdict=lots&sort=size&cursor=nonsense", status=400)
    assert "verdict is one of" in html
    assert "sort is one of newest, oldest, lost, served, expected; got &#39;size&#39;" in html
    assert "cursor: not a cursor" in html


def test_the_list_can_be_sorted(filled: httpx.Client) -> None:
    def head(html: str, text: str) -> re.Match[str]:
        found = re.search(rf'<th [^>]*?(aria-sort="\w+")?><a[^>]*href="([^"]+)">{text}</a>', html)
        assert found is not None
        return found

    def link(html: str, text: str) -> str:
        return head(html, text).group(2).replace("&amp;", "&")

    newest = page(filled, "/requests?engine=inc-a1")
    assert head(newest, "Finished").group(1) == 'aria-sort="descending"'
    oldest = page(filled, link(newest, "Finished"))
    assert head(oldest, "Finished").group(1) == 'aria-sort="ascending"'
    assert link(oldest, "Finished") == "/requests?engine=inc-a1"
    by_loss = page(filled, link(oldest, "Lost"))
    assert head(by_loss, "Lost").group(1) == 'aria-sort="descending"'
    assert head(by_loss, "Finished").group(1) is None
    assert '<option value="lost" selected>most tokens lost first</option>' in by_loss
    assert "those that have none are not listed" in by_loss
    assert "sort=lost" in re.findall(r'href="(/api/v1/export[^"]+)"', by_loss)[0]
    lost = [
        int(text.replace(",", "")) for text in re.findall(r'<td class="r bad">([0-9,]+)', by_loss)
    ]
    assert lost
    assert lost == sorted(lost, reverse=True)
    assert 'href="/requests?sort=lost">Clear' in by_loss


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
        for markup in ("<script>alert", "<img", "<b>bold", "<i>", "<u>m"):
            assert markup not in html
    assert "&lt;script&gt;alert(1)" in page(client, paths[4])


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
        named = re.findall(r"/static/[0-9a-f]+/([^\"#]+)", page(filled, path))
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
