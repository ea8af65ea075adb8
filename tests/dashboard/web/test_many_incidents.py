"""An open incident stays in sight however many newer ones there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import factory
import httpx
import msgspec
import pytest
from exports import as_json, records_export
from markup import Page
from noticing import kept

from kvlens.dashboard.model.incident import Incident, RequestScope
from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.sqlite import SqliteStore

OLD = factory.engine("node-a:0", "inc-a1")
BUSY = factory.engine("node-b:0", "inc-b1", affected=False)
NEWER = 600
JSON = "application/json"


def incident(ident: str, state: str, opened_at: float) -> Incident:
    made = kept(ident, state, opened_at, OLD if ident == "old" else BUSY)
    scope = RequestScope(since=factory.START, until=factory.START + 60)
    return msgspec.structs.replace(made, scope=scope)


@pytest.fixture(params=["closed", "open"])
def client(request: pytest.FixtureRequest, settings: Settings) -> Iterator[httpx.Client]:
    """A server whose one engine has an old open incident, and another 600 newer ones."""
    newer = [incident(f"n{n}", request.param, factory.START + 100 + n) for n in range(NEWER)]
    with closing(SqliteStore(settings.store)) as store:
        store.save_detection(1, [incident("old", "open", factory.START), *newer], [])
    with running(settings) as url, httpx.Client(base_url=url, timeout=30) as opened:
        for info in (OLD, BUSY):
            body = as_json(records_export(info, [lost(info)]))
            sent = opened.post("/v1/traces", content=body, headers={"content-type": JSON})
            sent.raise_for_status()
        yield opened


def lost(info: factory.EngineInfo) -> factory.RequestRecord:
    return factory.lost_record(1 if info is OLD else 2, info, finish=factory.START + 30)


def open_number(client: httpx.Client) -> int:
    states = client.get("/api/v1/incidents", params={"engine": "inc-b1"}).json()["incidents"]
    return 1 + sum(found["state"] == "open" for found in states)


def test_pages_show_it(client: httpx.Client) -> None:
    for path in ("/engines/inc-a1", "/engines/node-a:0", "/incidents", "/"):
        assert client.get(path).text.count("summary of old") == 1, path
    request = client.get(f"/requests/{lost(OLD).request_id}").text
    assert "/incidents/old" in request


def test_the_api_lists_it(client: httpx.Client) -> None:
    for params in ({}, {"state": "open"}, {"engine": "inc-a1"}, {"engine": "node-a:0"}):
        found = client.get("/api/v1/incidents", params=params).json()["incidents"]
        assert [item["id"] for item in found].count("old") == 1, params
        times = [item["opened_at"] for item in found]
        assert times == sorted(times, reverse=True)
    newest = client.get("/api/v1/incidents", params={"limit": 3}).json()["incidents"]
    assert [item["id"] for item in newest] == ["n599", "n598", "n597"]


def test_every_count_includes_it(client: httpx.Client) -> None:
    expected = open_number(client)
    pages = {path: client.get(path).text for path in ("/", "/incidents", "/engines/inc-a1")}
    for path, html in pages.items():
        assert Page(html).texts("[title='Open incidents']") == [f"{expected} open"], path
    assert Page(pages["/incidents"]).section("Open").texts(".panel-head .num") == [str(expected)]
    assert "1 open" in Page(pages["/engines/inc-a1"]).section("Incidents of this engine")
    engines = client.get("/api/v1/engines").json()["engines"]
    counted = {item["incarnation_id"]: item["open_incidents"] for item in engines}
    assert counted == {"inc-a1": 1, "inc-b1": expected - 1}
    assert f"kvlens_dashboard_open_incidents {expected:.1f}" in client.get("/metrics").text


def test_a_list_that_is_cut_says_so(client: httpx.Client) -> None:
    html = client.get("/incidents").text
    if open_number(client) == 1:
        assert "the newest 500" in html
        assert "summary of n100" in html
        assert "summary of n99<" not in html
    else:
        assert html.count('class="incident bad"') == NEWER + 1


def test_the_stream_begins_with_it(client: httpx.Client) -> None:
    with client.stream("GET", "/api/v1/stream") as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data:"))
    assert msgspec.json.decode(first.removeprefix("data:").strip())["id"] == "old"
