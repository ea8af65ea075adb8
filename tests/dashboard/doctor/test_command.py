from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from metrics_pages import f16, page

from kvlens.dashboard.cli import main
from kvlens.dashboard.doctor.bundle import Redactor
from kvlens.dashboard.doctor.source import SourceError, from_url

SECRET = "acme-internal-llm"


@pytest.fixture
def pages(tmp_path: Path) -> tuple[str, str]:
    """F16 as files, with a model's name."""
    paths = tmp_path / "before.txt", tmp_path / "after.txt"
    for path, text in zip(paths, f16(), strict=True):
        path.write_text(text.replace('model_name="m"', f'model_name="/models/{SECRET}"'))
    return str(paths[0]), str(paths[1])


class Server:
    """Serves what it is given, in turn; the last answer again and again."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        rest = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = rest[0]
                if len(rest) > 1:
                    del rest[0]
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/metrics")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def start(*answers: tuple[int, str]) -> str:
        servers.append(Server(*answers))
        return servers[-1].address

    yield start
    for server in servers:
        server.close()


def test_a_critical_finding_is_exit_code_1(
    pages: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *pages, "--json", str(tmp_path / "out.json")]) == 1
    text = capsys.readouterr().out
    assert "CRITICAL zero_hit (confidence: likely, status: lost)" in text
    assert "Next step: Load KVLensOffloadingConnector" in text
    report = json.loads((tmp_path / "out.json").read_text())
    (finding,) = report["findings"]
    assert {"kind", "severity", "status", "confidence", "evidence", "next_step"} < finding.keys()
    assert (finding["kind"], finding["engine"]) == ("zero_hit", "0")
    assert {check["status"] for check in report["engines"][0]["checks"]} == {
        "found", "fine", "unknown",
    }  # fmt: skip


def test_nothing_found_is_exit_code_0(
    pages: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", pages[0], pages[0]]) == 0
    assert "Nothing wrong was found" in capsys.readouterr().out


def test_a_bundle_tells_all_but_names(pages: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    main(["doctor", *pages, "--bundle", str(path)])
    text = path.read_text()
    assert SECRET not in text
    assert str(tmp_path) not in text
    bundle = json.loads(text)
    again = [tmp_path / name for name in ("b.txt", "a.txt")]
    for target, name in zip(again, ("before", "after"), strict=True):
        target.write_text(bundle["pages"][name])
    assert main(["doctor", *map(str, again), "--json", str(tmp_path / "again.json")]) == 1
    replayed = json.loads((tmp_path / "again.json").read_text())
    assert replayed == bundle["report"]


def test_redaction_keeps_what_is_harmless_and_hides_the_rest() -> None:
    redactor = Redactor(b"salt")
    line = (
        'vllm:lora_requests_info{running_lora_adapters="acme-adapter",max_lora="4"} 1\n'
        'vllm:cache_config_info{engine="0",block_size="16",served_from="s3://acme/bucket"} 1\n'
        'kvlens_lookups_total{exit="served",engine="0",model_name="acme"} 3\n'
        'kvlens_info{layout="acme secret!",lookup="stock"} 1\n'
        'http_requests_total{path="/v1/acme"} 5\n'
    )
    page = redactor.page(line)
    assert "acme" not in page
    assert 'exit="served"' in page
    assert 'block_size="16"' in page
    assert 'max_lora="4"' in page
    assert "http_requests" not in page
    hidden = redactor.page(
        'vllm:x{instance="10.1.2.3",engine="10.1.2.3:8000",key="123456789012",'
        'seed="0",n="1e-05"} 1\n'
    )
    assert "10.1.2.3" not in hidden
    assert "123456789012" not in hidden
    assert 'seed="0"' in hidden
    assert 'n="1e-05"' in hidden
    assert redactor.name("acme") == redactor.name("acme") != Redactor(b"other").name("acme")


def test_what_a_page_says_of_itself_is_not_trusted(tmp_path: Path) -> None:
    labels = 'engine="acme-node",model_name="acme"'
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    for path, count in ((before, 0), (after, 5)):
        path.write_text(
            f'kvlens_info{{{labels},vllm_version="0.29.0 of acme!",layout="acme corp"}} 1\n'
            f"kvlens_expected_tokens_total{{{labels}}} {count * 1000}\n"
            f"kvlens_served_tokens_total{{{labels}}} 0\n"
            f'kvlens_requests_total{{{labels},verdict="lost"}} {count}\n'
        )
    bundle = tmp_path / "bundle.json"
    assert main(["doctor", str(before), str(after), "--bundle", str(bundle)]) == 1
    assert "acme" not in bundle.read_text()


def test_pages_in_the_wrong_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = tmp_path / "before.txt", tmp_path / "after.txt"
    for path, text in zip(paths, f16(), strict=True):
        path.write_text(text)
    assert main(["doctor", str(paths[1]), str(paths[0])]) == 2
    assert f"{paths[0]} was saved before {paths[1]}: give the earlier" in capsys.readouterr().err


def test_a_restart_is_no_wrong_order(tmp_path: Path) -> None:
    """N7: a later start, or none told of, and counters that began anew."""
    full, fresh = f16()[1], page(stored=1, external=(10, 0), started=1_796_900_000)
    for drop in ("", "process_start_time"):
        paths = tmp_path / "before.txt", tmp_path / "after.txt"
        for path, text in zip(paths, (full, fresh), strict=True):
            path.write_text("".join(
                line for line in text.splitlines(True) if not drop or drop not in line
            ))  # fmt: skip
        assert main(["doctor", *map(str, paths)]) == 0


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_pages_as_shells_write_them(tmp_path: Path, encoding: str) -> None:
    paths = tmp_path / "before.txt", tmp_path / "after.txt"
    for path, text in zip(paths, f16(), strict=True):
        path.write_text(text.replace("\n", "\r\n"), encoding=encoding, newline="")
    assert main(["doctor", *map(str, paths)]) == 1


def test_a_running_server_is_asked_twice(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = serve((200, page(stored=1)), (200, page(stored=1)))
    assert main(["doctor", address, "--wait", "0"]) == 0
    streams = capsys.readouterr()
    assert "watching for 0 s" in streams.err
    assert "a running server" in streams.out
    assert address not in streams.out


def test_since_its_start_counts_for_a_running_server(serve: Any) -> None:
    """F16 seen at one glance: nothing served in all the time since the start."""
    pages = from_url(
        "http://" + serve((200, f16()[1])), 0.0, lambda _: None, lambda: 1_796_000_000 + 3_600
    )
    since_start, meanwhile = pages.windows[0]
    assert (since_start.seconds, since_start.rise("external_queries")) == (3_600, 2_250_000)
    assert meanwhile.rise("external_queries") == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, "no"), "answers with HTTP status 404: give the address of a vLLM server"),
        ((302, ""), "HTTP status 302"),
        ((200, "<html>"), "HTML or XML"),
        ((200, "node_load1 1\n"), "has no metrics of vLLM"),
    ],
)
def test_servers_that_cannot_be_examined(serve: Any, answer: tuple[int, str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        from_url(serve(answer), 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:1"], "is the server up"),
        (["ftp://host"], "is no address: give http://host:port"),
        (["a", "b", "c"], "the earlier one first"),
        (["missing.txt", "gone.txt"], "missing.txt: No such file"),
        (["missing.txt"], "missing.txt: there is no such file, and two saved pages are needed"),
        (["./no/metrics"], "there is no such file"),
        (["http://a:1", "http://b:1"], "two servers are two calls"),
        (["http://a:1", "after.txt"], "give one address, or two saved pages"),
        (["http://me:secret@host:8000"], "host: credentials in addresses are not supported"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments, "--wait", "0"]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_used(
    pages: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", pages[0]]) == 2
    assert "save another one some minutes later" in capsys.readouterr().err
    (tmp_path / "log.txt").write_text("INFO 12-01 engine started\n")
    assert main(["doctor", str(tmp_path / "log.txt"), pages[1]]) == 2
    assert "line 1 is no Prometheus metric" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text(Path(pages[1]).read_text().replace('engine="0"', 'engine="7"'))
    assert main(["doctor", pages[0], str(other)]) == 2
    assert "of different engines" in capsys.readouterr().err
    assert main(["doctor", *pages, "--json", str(tmp_path / "no" / "such.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", *pages, "--wait", "soon"])
    assert "number of seconds" in capsys.readouterr().err
