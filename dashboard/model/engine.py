"""One incarnation of an engine as the dashboard knows it."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvlens.dashboard.model.totals import Totals
from kvlens.telemetry.records import EngineInfo

STOPPED: Final = "stopped"
REPLACED: Final = "replaced"
"""A later incarnation of the same engine has started."""
SILENT: Final = "silent"
"""Nothing was heard of it for long: it crashed, or is cut off."""


class EngineEvent(NamedTuple):
    """An engine's connector started or stopped."""

    incarnation_id: str
    state: str
    """``semconv.ENGINE_STARTED``, ``ENGINE_ALIVE`` or ``ENGINE_STOPPED``."""
    time: float


class Engine(msgspec.Struct, kw_only=True):
    """One incarnation of an engine, as far as it is known."""

    info: EngineInfo
    first_seen: float
    last_seen: float
    """Newest time that the engine itself reported, by more than that it lives."""
    ended_at: float | None
    end_reason: str | None
    """:data:`STOPPED`, :data:`REPLACED` or :data:`SILENT`; only the last may be taken back."""
    totals: Totals
    open_incidents: int
