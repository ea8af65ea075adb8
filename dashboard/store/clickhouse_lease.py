"""Which of the dashboards that share a ClickHouse runs the detectors.

Each writes a heartbeat row; the one that started first among those whose heart
beats leads. All read the same rows, so all agree. A dashboard that cannot write its
own row stops leading before the others take over. Where two lead for a moment all the
same (replicas that lag), both find the same incidents, with the same ids.
"""

from __future__ import annotations

import time
import uuid
from typing import Final

from kvlens.dashboard.store.clickhouse_http import Http

BEAT: Final = 2.0
"""Seconds between two heartbeats."""
LEASE: Final = 12.0
"""Seconds without a heartbeat (by the server's clock) after which others take over."""
_FENCE: Final = 8.0
"""Seconds without a heartbeat of its own after which a dashboard stops leading."""


class Lease:
    """One dashboard's part in it. Not thread-safe."""

    def __init__(self, http: Http, table: str) -> None:
        self._http = http
        self._table = table
        self._id = uuid.uuid4().hex
        self._started_at = time.time()
        self._beaten_at = float("-inf")
        self._leads = False

    def lead(self) -> bool:
        """Keep the heart beating; whether this dashboard leads. Raises ``StoreError``."""
        now = time.monotonic()
        if now - self._beaten_at >= BEAT:
            self._beat(gone=False)
            found = self._http.query(
                f"SELECT id FROM {self._table} FINAL WHERE gone = 0"
                f" AND beat > now64(3) - INTERVAL {int(LEASE)} SECOND"
                " ORDER BY started_at, id LIMIT 1"
            )
            self._beaten_at, self._leads = now, found == [[self._id]]
        return self._leads

    @property
    def valid(self) -> bool:
        """Whether what :meth:`lead` said last still holds."""
        return self._leads and time.monotonic() - self._beaten_at < _FENCE

    def leave(self) -> None:
        """Let another take over at once."""
        self._leads = False
        self._beat(gone=True)

    def _beat(self, *, gone: bool) -> None:
        row = {
            "id": self._id,
            "started_at": self._started_at,
            "gone": int(gone),
            "version": time.time_ns(),
        }
        self._http.insert(self._table, [row])
