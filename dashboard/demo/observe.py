"""The dashboard beside the demo: started as a user would, read through its REST API."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from kvlens.dashboard.demo.engine import responds
from kvlens.dashboard.demo.process import Child, DemoError, Supervisor

START_SECONDS = 30.0
SETTLE_SECONDS = 15.0
"""How long records may take from the engine to the API."""
_PAGE = 200


class Dashboard:
    """A running ``kvlens serve``."""

    def __init__(self, child: Child, url: str) -> None:
        self.child = child
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=10.0, trust_env=False)

    @classmethod
    def start(cls, supervisor: Supervisor, port: int, folder: Path) -> Dashboard:
        """Start it with a store of its own below ``folder``; raises :class:`DemoError`."""
        require_free(port)
        command = [sys.executable, "-m", "kvlens.dashboard.cli", "serve", "--port", str(port)]
        command += ["--host", "127.0.0.1", "--store", str(folder / "demo.db")]
        child = supervisor.start("the dashboard", command, folder / "dashboard.log")
        url = f"http://127.0.0.1:{port}"
        child.wait_until(lambda: responds(f"{url}/readyz"), START_SECONDS)
        return cls(child, url)

    def close(self) -> None:
        """Close the connections; the dashboard itself goes on."""
        self._http.close()

    def records(self, engine_id: str, at_least: int) -> list[dict[str, Any]]:
        """Request records of an engine, waiting until there are ``at_least`` so many."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            records = self._pages("/api/v1/requests", "requests", engine=engine_id)
            if len(records) >= at_least or time.monotonic() > deadline:
                return records
            time.sleep(0.2)

    def incidents(self, engine_id: str, at_least: int) -> list[dict[str, Any]]:
        """Incidents that affect an engine, waiting until there are ``at_least`` so many."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = [
                incident
                for incident in self._pages("/api/v1/incidents", "incidents")
                if incident["engine_id"] == engine_id
            ]
            if len(found) >= at_least or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _pages(self, path: str, key: str, **query: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            params = {**query, "limit": str(_PAGE), **({"cursor": cursor} if cursor else {})}
            try:
                response = self._http.get(path, params=params)
                response.raise_for_status()
            except httpx.HTTPError as error:
                self.child.require_alive()
                raise DemoError(
                    f"the dashboard did not answer {path}: {error}. Its last lines:\n"
                    f"{self.child.log_tail()}"
                ) from error
            page = response.json()
            rows += page[key]
            cursor = page.get("next_cursor")
            if not cursor:
                return rows


def require_free(port: int) -> None:
    """Raise :class:`DemoError` if something listens on loopback ``port`` already."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise DemoError(
            f"port {port} cannot be used ({error.strerror}): choose another with --port"
        ) from error
