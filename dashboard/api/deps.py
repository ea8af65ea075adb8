"""What the routes need, built once per application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from kvlens.dashboard.api.hub import Hub
from kvlens.dashboard.ingest.writer import Writer
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import Store


@dataclass(frozen=True)
class Services:
    """Lives from the application's start to its end, at ``app.state.services``."""

    settings: Settings
    store: Store
    writer: Writer
    hub: Hub
    metrics: SelfMetrics


def services(request: Request) -> Services:
    """Return the application's services."""
    found: Services = request.app.state.services
    return found


ServicesDep = Annotated[Services, Depends(services)]
