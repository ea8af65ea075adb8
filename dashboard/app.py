"""The dashboard as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kvlens.dashboard.settings import Settings
from kvlens.telemetry import __version__


def create_app(settings: Settings) -> FastAPI:
    """Build the application; the store is opened when it starts up.

    ``app.state.services`` (see ``api.deps.Services``) holds the store, the
    writer and the stream hub while it runs.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield

    return FastAPI(
        title="kvlens", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
