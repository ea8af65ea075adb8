"""A real HTTP receiver that answers as it is told and keeps what it got."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from waiting import PATIENCE, eventually


class Got(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """``answers`` are statuses of the next requests, 200 when there are none left."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.got: list[Got] = []
        self.answers: list[int] = []
        self.headers: dict[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()

    def wait_for(self, count: int) -> list[Got]:
        eventually(lambda: len(self.got) >= count)
        return self.got

    def types(self) -> list[str]:
        return [got.json["type"] for got in self.got]


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.gate.wait(PATIENCE)
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.got.append(Got(self.path, headers, body))
            self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
