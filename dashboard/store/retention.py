"""Keeping the SQLite file within its age and size, a few rows at a time."""

from __future__ import annotations

import logging
import sqlite3
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

from kvlens.dashboard.store.append import transaction
from kvlens.dashboard.store.base import Upkeep
from kvlens.dashboard.store.rollup import HOUR, MINUTE
from kvlens.dashboard.view.format import size

STEP: Final = 500
"""Requests deleted in one step: a few milliseconds between two batches."""
_PRUNE_EVERY: Final = 3600.0
_TELL_EVERY: Final = 10.0
"""Seconds between two words on how far a deletion has come."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionLimits:
    """Ages in seconds, size in bytes."""

    request_age: float
    rollup_age: float
    max_bytes: int


class Retention:
    """Deletes what is too old, then the oldest while the file is too large."""

    def __init__(self, db: sqlite3.Connection, limits: RetentionLimits) -> None:
        self._db = db
        self._limits = limits
        self._pruned_at = float("-inf")
        self._running = 0
        self._told_at = 0.0
        self.engines_went = False
        """Whether engines were deleted; whoever keeps them in memory clears it."""

    def step(self, now: float) -> Upkeep:
        """Do one small step."""
        if now - self._pruned_at >= _PRUNE_EVERY:
            self._pruned_at = now
            self._prune(now)
        cutoff = now - self._limits.request_age
        with transaction(self._db):
            deleted = self._delete("finish_time < ?", cutoff)
            used = self.size()
            if not deleted and used > self._limits.max_bytes:
                deleted = self._delete("? IS NULL", None)
        if deleted:
            self._running += deleted
            # By script: execute() would step this statement once, which frees one page.
            self._db.executescript("PRAGMA incremental_vacuum(1000)")
            self._tell_progress()
        elif self._running:
            _logger.info("retention: deleted %d requests", self._running)
            self._running = 0
        return Upkeep(deleted > 0, deleted, used)

    def _tell_progress(self) -> None:
        """Say now and then how far a long deletion has come."""
        now = time.monotonic()
        if self._running <= STEP:
            self._told_at = now
        elif now - self._told_at >= _TELL_EVERY:
            self._told_at = now
            oldest = self._db.execute("SELECT min(finish_time) FROM requests").fetchone()[0]
            until = datetime.fromtimestamp(oldest or 0, timezone.utc).isoformat(" ", "seconds")
            _logger.info(
                "retention: deleted %d requests so far, up to %s; %s in use",
                self._running,
                until,
                size(self.size()),
            )

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
            self._prune_engines(now - self._limits.rollup_age)
            self._db.execute("DELETE FROM actions WHERE time < ?", (now - self._limits.rollup_age,))
            self._db.execute("PRAGMA optimize").fetchall()

    def _prune_engines(self, before: float) -> None:
        """Engines that ended so long ago that nothing of them is left to show."""
        gone = self._db.execute(
            "SELECT engine_no FROM engines WHERE ended_at IS NOT NULL AND last_seen < ?"
            " AND NOT EXISTS (SELECT 1 FROM requests WHERE requests.engine_no = engines.engine_no)",
            (before,),
        ).fetchall()
        for table in ("sums", "engines"):
            self._db.executemany(f"DELETE FROM {table} WHERE engine_no = ?", gone)
        self.engines_went |= bool(gone)
