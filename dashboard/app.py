"""The dashboard as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvlens.dashboard.api import actions, export, health, routes, stream
from kvlens.dashboard.api import ingest as ingest
from kvlens.dashboard.api import targets as scrape
from kvlens.dashboard.api.deps import Services
from kvlens.dashboard.api.hub import Hub
from kvlens.dashboard.api.security import Security
from kvlens.dashboard.api.shapes import JSON
from kvlens.dashboard.detect.engine import Detection
from kvlens.dashboard.detect.panel import all_detectors
from kvlens.dashboard.detect.scraped import Scraped
from kvlens.dashboard.ingest.follower import Follower, FollowerAudience, SharedStore
from kvlens.dashboard.ingest.scraper import Scraper
from kvlens.dashboard.ingest.writer import Writer
from kvlens.dashboard.notify.notifier import Notifier
from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.sizing import routes as sizing
from kvlens.dashboard.store.base import Store
from kvlens.dashboard.store.clickhouse import ClickHouseStore
from kvlens.dashboard.store.retention import RetentionLimits
from kvlens.dashboard.store.sqlite import SqliteStore
from kvlens.dashboard.web import runbooks
from kvlens.dashboard.web.routes import router as web
from kvlens.dashboard.web.templating import render
from kvlens.telemetry import __version__


def open_store(settings: Settings) -> Store:
    """Open the store that ``settings`` name; raises ``StoreError``."""
    limits = RetentionLimits(
        settings.retention_seconds,
        settings.retention_rollup_seconds,
        settings.retention_max_bytes,
    )
    target = settings.clickhouse
    return (
        SqliteStore(settings.store, limits) if target is None else ClickHouseStore(target, limits)
    )


def _detector(
    settings: Settings, store: Store, hub: Hub, notifier: Notifier, metrics: SelfMetrics
) -> Detection | Follower:
    """Detection here and now, or, where others share the store, in turn with them."""

    def make() -> Detection:
        return Detection(
            all_detectors(settings.thresholds),
            store,
            hub.incident,
            metrics.errors.inc,
            Scraped(settings.thresholds),
        )

    if store.shared:
        return Follower(cast(SharedStore, store), make, hub, notifier, metrics)
    notifier.adopt(store.incidents("open"))
    detection = make()
    detection.restore()
    return detection


def create_app(settings: Settings, make_store: Callable[[Settings], Store] = open_store) -> FastAPI:
    """Build the application; the store is opened when it starts up.

    ``app.state.services`` (see ``api.deps.Services``) holds the store, the
    writer and the stream hub while it runs, ``app.state.store`` the store.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = make_store(settings)
        try:
            metrics = SelfMetrics()
            notifier = Notifier(settings, store.handling, metrics)
            hub = Hub(metrics, settings.stream_queue, store.handling, [notifier.incident])
            detector = _detector(settings, store, hub, notifier, metrics)
            audience = FollowerAudience(hub, hub.show) if isinstance(detector, Follower) else hub
            writer = Writer(
                store,
                detector,
                audience,
                metrics,
                settings.queue_batches,
                settings.engine_gone_seconds,
            )
            hub.bind(store.incidents("open"))
            app.state.store = store
            app.state.services = Services(settings, store, writer, hub, metrics)
            notifier.start()
            app.state.scraper = scraper = Scraper(settings, writer, metrics)
            writer.start()
            scraper.start()
            if isinstance(detector, Follower):
                detector.start()
            try:
                yield
            finally:
                hub.close()
                await scraper.stop()
                writer.stop()
                if isinstance(detector, Follower):
                    detector.stop()
                notifier.stop()
        finally:
            store.close()

    app = FastAPI(
        title="kvlens", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Security, settings=settings)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _absent)
    for router in (
        ingest.router,
        stream.router,
        actions.router,
        sizing.router,
        routes.router,
        export.router,
        scrape.router,
        health.router,
        web,
        runbooks.router,
    ):
        app.include_router(router)
    return app


async def _absent(request: Request, error: Exception) -> Response:
    """A page for people, the usual JSON for programs."""
    assert isinstance(error, HTTPException)
    wants = request.headers.get("accept", "")
    if error.status_code != 404 or "text/html" not in wants or request.method != "GET":
        return await http_exception_handler(request, error)
    found: Services = request.app.state.services
    path = request.url.path
    return render(found, request, "missing.html", status=404, what="page", ident=path)


def _invalid(request: Request, error: Exception) -> JSON:
    """422 with one sentence per wrong parameter."""
    assert isinstance(error, RequestValidationError)
    return JSON({"detail": "; ".join(_explain(item) for item in error.errors())}, 422)


def _explain(error: dict[str, object]) -> str:
    location = error["loc"]
    assert isinstance(location, tuple)
    name = ".".join(str(part) for part in location[1:]) or str(location[0])
    if error["type"] == "extra_forbidden":
        return f"{name}: there is no such parameter"
    return f"{name}: {str(error['msg']).removeprefix('Value error, ')}"
