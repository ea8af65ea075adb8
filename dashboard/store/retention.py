"""Keeping the SQLite file within its age and size, a few rows at a time."""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.store.append import transaction
from kvlens.dashboard.store.rollup import HOUR, MINUTE

STEP: Final = 500
"""Requests deleted in one step: a few milliseconds between two batches."""
_PRUNE_EVERY: Final = 3600.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Ages in seconds, size in bytes."""

    request_age: float
    rollup_age: float
    max_bytes: int


class Retention:
    """Deletes what is too old, then the oldest while the file is too large."""

    def __init__(self, db: sqlite3.Connection, limits: Limits) -> None:
        self._db = db
        self._limits = limits
        self._pruned_at = float("-inf")
        self._running = 0

    def step(self, now: float) -> bool:
        """Do one small step; True when there is more to do."""
        if now - self._pruned_at >= _PRUNE_EVERY:
            self._pruned_at = now
            self._prune(now)
        cutoff = now - self._limits.request_age
        with transaction(self._db):
            deleted = self._delete("finish_time < ?", cutoff)
            if not deleted and self.size() > self._limits.max_bytes:
                deleted = self._delete("? IS NULL", None)
        if deleted:
            self._running += deleted
            # By script: execute() would step this statement once, which frees one page.
            self._db.executescript("PRAGMA incremental_vacuum(1000)")
        elif self._running:
            _logger.info("retention: deleted %d requests", self._running)
            self._running = 0
        return deleted > 0

    def size(self) -> int:
        """Bytes in use, without what is free to be written again."""
        pages, free, page = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * page)

    def _delete(self, condition: str, value: float | None) -> int:
        seqs = self._db.execute(
            f"SELECT seq FROM requests INDEXED BY requests_by_time WHERE {condition}"
            " ORDER BY finish_time LIMIT ?",
            (value, STEP),
        ).fetchall()
        self._db.executemany("DELETE FROM bodies WHERE seq = ?", seqs)
        self._db.executemany("DELETE FROM requests WHERE seq = ?", seqs)
        return len(seqs)

    def _prune(self, now: float) -> None:
        """Old sums and closed incidents: few rows, hourly."""
        # Minutes serve charts of the time whose requests are kept, hours those of before.
        ages = {MINUTE: self._limits.request_age, HOUR: self._limits.rollup_age}
        with transaction(self._db):
            numbers = self._db.execute("SELECT engine_no FROM engines UNION SELECT 0").fetchall()
            self._db.executemany(
                "DELETE FROM sums WHERE level = ? AND engine_no = ? AND slot < ?",
                [
                    (level, number, int((now - age) // level))
                    for level, age in ages.items()
                    for (number,) in numbers
                ],
            )
            self._db.execute(
                "DELETE FROM incidents WHERE state = 'closed' AND closed_at < ?",
                (now - self._limits.request_age,),
            )
            self._db.execute("DELETE FROM actions WHERE time < ?", (now - self._limits.rollup_age,))
            self._db.execute("PRAGMA optimize").fetchall()
