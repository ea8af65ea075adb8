"""Running the dashboard with uvicorn, in the foreground or on a thread."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn

from kvlens.dashboard.api.deps import Services
from kvlens.dashboard.app import create_app, open_store
from kvlens.dashboard.settings import Settings

_GRACE: Final = 3
"""Seconds that open connections get at the end."""
_MAX_CONNECTIONS: Final = 1000


class ServeError(RuntimeError):
    """The dashboard cannot listen or start; the message says what to change."""


class Server(uvicorn.Server):
    """Ends the event streams first when it stops: uvicorn would wait for them."""

    def __init__(self, settings: Settings) -> None:
        """Open the store; raises ``StoreError``."""
        store = open_store(settings)
        self._app = create_app(settings, lambda _: store)
        super().__init__(
            uvicorn.Config(
                self._app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE,
                limit_concurrency=_MAX_CONNECTIONS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down."""
        services: Services | None = getattr(self._app.state, "services", None)
        if services is not None:
            services.hub.close()
        await super().shutdown(sockets)


def listen(settings: Settings) -> socket.socket:
    """Bind ``host:port``; raises :class:`ServeError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ServeError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another "
            "with --host and --port"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """``http://host:port`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; raises :class:`ServeError` or ``StoreError``."""
    with listen(settings) as sock:
        server = Server(settings)
        print(f"kvlens dashboard: {url_of(sock)}  store: {settings.store_name}", file=sys.stderr)
        # uvicorn shuts down in order, then raises Ctrl-C anew.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    _check(server)


@contextmanager
def running(settings: Settings) -> Iterator[str]:
    """Serve on a thread; yields the URL once it answers. Raises :class:`ServeError`."""
    with listen(settings) as sock:
        server = Server(settings)
        thread = threading.Thread(
            target=server.run, args=([sock],), name="kvlens-dashboard", daemon=True
        )
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            _check(server)
            yield url_of(sock)
        finally:
            server.should_exit = True
            thread.join()


def _check(server: Server) -> None:
    if not server.started:
        raise ServeError("the dashboard did not start: see its log above")
