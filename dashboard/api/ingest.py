"""``POST /v1/traces`` and ``/v1/metrics``: OTLP/HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.api.shapes import errors
from kvlens.dashboard.ingest import otlp
from kvlens.dashboard.ingest.accept import OURS, Accepted, accept
from kvlens.dashboard.ingest.body import BodyError, decompress, read
from kvlens.dashboard.ingest.writer import Busy
from kvlens.dashboard.settings import Settings
from kvlens.dashboard.store.base import StoreError

router = APIRouter(prefix="/v1", tags=["ingest"])
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            otlp.PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
            otlp.JSON: {"schema": {"type": "object"}},
        },
    }
}
RETRY_AFTER: Final = "1"
"""Seconds after which a sender may try again."""


@router.post(
    "/traces",
    summary="OTLP/HTTP trace export, protobuf or JSON, gzip allowed",
    openapi_extra=_BODY,
    responses=errors(400, 413, 415, 429, 503),
)
async def traces(request: Request, services: ServicesDep) -> Response:
    """Answer once the records are durable; 429 when the queue is full."""
    media, settings, writer = otlp.JSON, services.settings, services.writer
    try:
        media = otlp.content_type(request.headers.get("content-type", ""))
        if writer.full:  # refused before its body takes memory
            raise Busy
        body = await read(request, settings.max_body_bytes)
        started = time.perf_counter()
        with writer.slot():
            accepted = await run_in_threadpool(_take, body, media, _encoding(request), settings)
            if any(accepted.batch):
                await asyncio.wrap_future(writer.submit(accepted.batch))
    except BodyError as error:
        return _failure(media, error.status, str(error))
    except Busy:
        services.metrics.backpressure.inc()
        return _failure(media, 429, "the dashboard's queue is full: send again later")
    except StoreError as error:
        return _failure(media, 503, str(error))
    services.metrics.ingest_seconds.observe(time.perf_counter() - started)
    services.metrics.ignored.inc(accepted.ignored)
    rejected = sum(accepted.rejected.values())
    services.metrics.rejected.inc(rejected)
    return Response(otlp.response(media, rejected, accepted.message), media_type=media)


@router.post(
    "/metrics",
    summary="OTLP/HTTP metrics export: acknowledged, not used",
    openapi_extra=_BODY,
    responses=errors(400, 413, 415),
)
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Take metrics, so that a collector with one pipeline for both does not fail."""
    media = otlp.JSON
    settings = services.settings
    try:
        media = otlp.content_type(request.headers.get("content-type", ""))
        body = await read(request, settings.max_body_bytes)
        limit = settings.max_decompressed_bytes
        body = await run_in_threadpool(decompress, body, _encoding(request), limit)
        otlp.check_metrics(body, media)
    except BodyError as error:
        return _failure(media, error.status, str(error))
    services.metrics.metric_exports.inc()
    return Response(otlp.response(media), media_type=media)


def _encoding(request: Request) -> str:
    return request.headers.get("content-encoding", "").strip().lower()


def _take(body: bytes, media: str, encoding: str, settings: Settings) -> Accepted:
    raw = decompress(body, encoding, settings.max_decompressed_bytes)
    return accept(otlp.read_traces(raw, media, OURS), settings.max_record_bytes)


def _failure(media: str, status: int, message: str) -> Response:
    headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else None
    return Response(otlp.failure(media, status, message), status, media_type=media, headers=headers)
