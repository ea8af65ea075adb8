"""``/metrics``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder

from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.api.shapes import errors

router = APIRouter(tags=["operation"])


@router.get(
    "/metrics",
    summary="The dashboard's own metrics, for Prometheus",
    response_class=PlainTextResponse,
)
def metrics(request: Request, services: ServicesDep) -> Response:
    """Text or OpenMetrics, as the scraper asks."""
    encoder, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(services.metrics.registry), headers={"Content-Type": content_type})


@router.get("/healthz", summary="The process answers", response_class=PlainTextResponse)
def healthz() -> str:
    """Liveness."""
    return "ok\n"


@router.get(
    "/readyz",
    summary="Records can be stored",
    response_class=PlainTextResponse,
    responses=errors(503),
)
def readyz(services: ServicesDep) -> PlainTextResponse:
    """Readiness: 503 once the writer has ended."""
    if services.writer.alive:
        return PlainTextResponse("ok\n")
    return PlainTextResponse("the writer has stopped: restart the dashboard\n", 503)
