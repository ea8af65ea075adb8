"""The scraper against real HTTP servers, good and bad, and as a part of the dashboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from metrics_pages import GB, page
from waiting import eventually

from kvlens.dashboard.server import running
from kvlens.dashboard.settings import Settings

Answer = Callable[[str], tuple[int, bytes]]


class Web:
    """A server whose answer to each path can be changed; counts requests by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.seen: dict[str, int] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.seen[self.path] = web.seen.get(self.path, 0) + 1
                status, body = web.answers.get(self.path, lambda _: (404, b""))(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(self, path: str, body: str, status: int = 200) -> str:
        self.answers[path] = lambda _: (status, body.encode())
        return f"http://{self.address}{path}"


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.server.shutdown()
    made.server.server_close()


@contextmanager
def dashboard(tmp_path: Path, **settings: Any) -> Iterator[httpx.Client]:
    made = Settings(
        store=str(tmp_path / "k.db"),
        port=0,
        scrape_interval_seconds=1,
        scrape_refresh_seconds=1,
        **settings,
    )
    with running(made) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


def targets(client: httpx.Client) -> dict[str, dict[str, Any]]:
    answer = client.get("/api/v1/targets").json()["targets"]
    return {target["url"].rpartition("/")[2]: target for target in answer}


def test_good_and_bad_targets_side_by_side(web: Web, tmp_path: Path) -> None:
    urls = [
        web.put("/good", page(stored=GB)),
        web.put("/other", "node_load1 0.5\n"),
        web.put("/html", "<html>login"),
        web.put("/error", "", 500),
        web.put("/large", "x" * 4000),
        "http://127.0.0.1:1/refused",
    ]
    release = threading.Event()
    web.answers["/slow"] = lambda _: (200, b"x" if release.wait(30) else b"")
    urls.append(f"http://{web.address}/slow")
    settings = {"scrape": ",".join(urls), "scrape_timeout_seconds": 0.5, "scrape_max_bytes": 2000}
    with dashboard(tmp_path, **settings) as client:
        seen = eventually(
            lambda: (t := targets(client)) and all(x["last_scrape"] for x in t.values()) and t
        )
        release.set()
        assert {name: target["state"] for name, target in seen.items()} == {
            "good": "up",
            "other": "not_vllm",
            "html": "down",
            "error": "down",
            "large": "down",
            "refused": "down",
            "slow": "down",
        }
        assert "HTML or XML" in seen["html"]["error"]
        assert seen["error"]["error"] == "HTTP status 500"
        assert "larger than 2,000 bytes" in seen["large"]["error"]
        assert seen["slow"]["error"] == "no answer within 0.5 s"
        assert "ConnectError" in seen["refused"]["error"]
        assert (seen["good"]["engines"], seen["good"]["instrumented"]) == (1, False)
        metrics = client.get("/metrics").text
        assert 'kvlens_dashboard_scrape_targets{state="down"} 5.0' in metrics
        assert 'kvlens_dashboard_scrapes_total{outcome="ok"}' in metrics


def test_targets_from_a_file_and_from_http_come_and_go(web: Web, tmp_path: Path) -> None:
    first, second = web.put("/a", page(stored=1)), web.put("/b", page(stored=1))
    path = tmp_path / "targets.json"

    def group(url: str) -> list[dict[str, Any]]:
        return [{"targets": [web.address], "labels": {"__metrics_path__": "/" + url[-1]}}]

    path.write_text(json.dumps(group(first)))
    source = web.put("/sd", json.dumps(group(second)))
    with dashboard(tmp_path, scrape_file=str(path), scrape_http_sd=source) as client:
        eventually(
            lambda: {n: t["state"] for n, t in targets(client).items()} == {"a": "up", "b": "up"}
        )
        path.write_text("[]")
        eventually(lambda: targets(client).keys() == {"b"})
        path.unlink()  # nor does a file that went take its targets along
        web.put("/sd", "oops")  # a source that breaks keeps its last targets
        asked = web.seen["/sd"]
        eventually(lambda: web.seen["/sd"] >= asked + 2)
        assert targets(client).keys() == {"b"}


def losing(step: int) -> str:
    """An instrumented engine that loses everything, a little more with each step."""
    own = 'engine="0",model_name="m"'
    return page(stored=GB, external=(step * 9_000, 0)) + "".join(
        f"{line}\n"
        for line in (
            f"kvlens_expected_tokens_total{{{own}}} {step * 8192}",
            f"kvlens_served_tokens_total{{{own}}} 0",
            f'kvlens_requests_total{{{own},verdict="lost"}} {step * 4}',
            f'kvlens_lost_tokens_total{{{own},cause="drafter_fallback"}} {step * 8192}',
        )
    )


def test_an_incident_from_scrapes_alone_survives_a_restart(web: Web, tmp_path: Path) -> None:
    web.answers["/metrics"] = lambda path: (200, losing(web.seen[path]).encode())
    with dashboard(tmp_path, scrape=web.address) as client:
        (first,) = eventually(lambda: client.get("/api/v1/incidents").json()["incidents"])
        assert (first["kind"], first["severity"], first["cause"], first["state"]) == (
            "zero_hit",
            "critical",
            "drafter_fallback",
            "open",
        )
        assert first["engine_id"] == f"{web.address}/0"
        page_ = client.get(f"/incidents/{first['id']}")
        assert page_.status_code == 200
        assert "drafter" in page_.text
    with dashboard(tmp_path, scrape=web.address) as client:
        asked = web.seen["/metrics"]
        eventually(lambda: web.seen["/metrics"] >= asked + 2)
        again = client.get("/api/v1/incidents").json()["incidents"]
        assert [(i["id"], i["state"]) for i in again] == [(first["id"], "open")]


def test_a_mixed_fleet_is_scraped_alike(web: Web, tmp_path: Path) -> None:
    """LMCache's server stores nothing; SGLang and a vLLM without a connector are well."""

    def cache_server(path: str) -> tuple[int, bytes]:
        asked = web.seen[path] * 300_000
        own = 'model_name="m",cache_salt=""'
        lines = (f"lmcache_mp_lookup_requested_tokens_total{{{own}}} {asked}",
                 f"lmcache_mp_l1_write_chunks_total{{{own}}} 0")  # fmt: skip
        return 200, "".join(f"{line}\n" for line in lines).encode()

    web.answers["/lmcache"] = cache_server
    urls = [f"http://{web.address}/lmcache", web.put("/vllm", page()),
            web.put("/sglang", 'sglang:token_usage{model_name="q"} 0.5\n')]  # fmt: skip
    with dashboard(tmp_path, scrape=",".join(urls)) as client:
        (found,) = eventually(lambda: client.get("/api/v1/incidents").json()["incidents"])
        assert (found["kind"], found["severity"], found["model"]) == (
            "nothing_stored", "warning", "m",
        )  # fmt: skip
        assert "LMCache server" in client.get(f"/incidents/{found['id']}").text
        states = eventually(lambda: (t := targets(client)) and all(
            x["last_scrape"] for x in t.values()) and t)  # fmt: skip
        assert {name: item["state"] for name, item in states.items()} == {
            "lmcache": "up", "vllm": "up", "sglang": "up",
        }  # fmt: skip


def test_targets_that_cannot_be_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="give http://host:port"):
        Settings(scrape="ftp://x", store="/tmp/never")
    with pytest.raises(ValueError, match="give one with http"):
        Settings(scrape_http_sd="consul", store="/tmp/never")
    with pytest.raises(ValueError, match="credentials in addresses") as error:
        Settings(scrape_http_sd="http://me:secret@sd/targets", store="/tmp/never")
    assert "secret" not in str(error.value)


def test_targets_from_a_pattern_of_yaml_files(web: Web, tmp_path: Path) -> None:
    for name in ("a", "b"):
        web.put(f"/{name}", page(stored=1))
        (tmp_path / f"{name}.yml").write_text(
            f"- targets: ['{web.address}']\n  labels: {{__metrics_path__: /{name}}}\n"
        )
    with dashboard(tmp_path, scrape_file=str(tmp_path / "*.yml")) as client:
        eventually(lambda: [t["state"] for t in targets(client).values()] == ["up", "up"])
        assert set(targets(client)) == {"a", "b"}


def test_without_targets_nothing_runs(tmp_path: Path) -> None:
    with dashboard(tmp_path) as client:
        assert client.get("/api/v1/targets").json() == {"targets": []}
        assert "kvlens_dashboard_scrape_targets{" not in client.get("/metrics").text
