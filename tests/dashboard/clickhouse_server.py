"""A ClickHouse HTTP interface, as far as the store uses it, before the real engine (chdb).

chdb is ClickHouse in this process: it parses, checks and executes the store's SQL.
Not here: Keeper, so that ``ON CLUSTER`` is left out and ``Replicated…`` engines run
as their plain kind (their definitions are checked on their own), and the network
between shards: the cluster called ``main`` has one, which is this process.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

USER, PASSWORD = "kvlens", "pass/word"
CONFIG = """<clickhouse>
<tcp_port>9000</tcp_port>
<zookeeper><implementation>testkeeper</implementation></zookeeper>
<macros><shard>01</shard><replica>r1</replica></macros>
<remote_servers><main><shard><internal_replication>true</internal_replication>
<replica><host>127.0.0.1</host><port>9000</port></replica></shard></main></remote_servers>
</clickhouse>"""
_ON_CLUSTER = re.compile(r" ON CLUSTER '\w+'")
_REPLICATED = re.compile(r"Replicated(\w+)\('[^']*', '[^']*'(?:, )?")


class Engine:
    """The one chdb session of this process."""

    def __init__(self, folder: Path) -> None:
        from chdb import session  # type: ignore[import-not-found,unused-ignore]

        config = folder / "config.xml"
        config.write_text(CONFIG)
        self._session: Any = session.Session(f"{folder / 'data'}?config-file={config}")
        self._lock = threading.Lock()
        self.log: list[str] = []

    def run(self, sql: str, params: dict[str, str] | None = None) -> bytes:
        """Execute as it is; raises ``RuntimeError`` with ClickHouse's message."""
        with self._lock:
            self.log.append(sql)
            result = self._session.query(sql, "TabSeparated", params=params or {})
            return bytes(result.bytes() or b"")

    def close(self) -> None:
        self._session.close()


class Server:
    """Runs on loopback; ``failures`` are statuses and bodies to answer with first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures: list[tuple[int, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = server.answer(
                    dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True)),
                    body.decode(),
                    (self.headers["x-clickhouse-user"], self.headers["x-clickhouse-key"]),
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                if code := re.match(rb"Code: (\d+)", answer if status != 200 else b""):
                    self.send_header("X-ClickHouse-Exception-Code", code[1].decode())
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, database: str, options: str = "") -> str:
        user = f"{USER}:{PASSWORD.replace('/', '%2F')}"
        return f"clickhouse://{user}@127.0.0.1:{self.port}/{database}{options}"

    def answer(self, query: dict[str, str], body: str, login: tuple[str, str]) -> tuple[int, bytes]:
        if self.failures:
            status, text = self.failures.pop(0)
            return status, text.encode()
        if login != (USER, PASSWORD):
            return 403, b"Code: 516. DB::Exception: kvlens: Authentication failed"
        params = {k[6:]: v for k, v in query.items() if k.startswith("param_")}
        sql = f"{query['query']}\n{body}" if "query" in query else body
        try:
            return 200, self.engine.run(_without_keeper(sql), params)
        except RuntimeError as error:
            return 500, str(error).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def _without_keeper(sql: str) -> str:
    return (
        _REPLICATED.sub(r"\1(", _ON_CLUSTER.sub("", sql))
        if sql.startswith(("CREATE", "ALTER"))
        else sql
    )


@contextmanager
def serving() -> Iterator[Server]:
    """Start engine and server; at most once per process."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        server = Server(engine)
        try:
            yield server
        finally:
            server.close()
            engine.close()
