"""``/api/v1/export``: requests for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.api.params import MAX_LIMIT, RequestParams
from kvlens.dashboard.api.shapes import errors
from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store.base import Store, TooSlowError
from kvlens.telemetry.records import RequestRecord

router = APIRouter(prefix="/api/v1", tags=["read"])
COLUMNS: Final = (
    "finish_time",
    "request_id",
    "internal_request_id",
    "engine_id",
    "incarnation_id",
    "model",
    "verdict",
    "cause",
    "confidence",
    "vetoing_group",
    "prompt_tokens",
    "local_tokens",
    "served_tokens",
    "servable_tokens",
    "expected_tokens",
    "lost_tokens",
    "lost_at_lookup",
    "lost_at_store",
    "computed_tokens",
    "evicted_tokens",
    "lost_gpu_seconds",
    "deferral_seconds",
    "output_tokens",
    "finish_reason",
    "preemptions",
    "sampling_probability",
    "trace_id",
    "summary",
)
"""Of CSV, in this order; times are Unix seconds."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


class Export(RequestParams):
    """Filters of requests, and the form."""

    format: Literal["jsonl", "csv"] = Field(
        "jsonl", description="jsonl: whole records, one per line; csv: their numbers"
    )


@router.get(
    "/export",
    summary="Finished requests as JSON lines or CSV",
    response_class=StreamingResponse,
    responses=errors(404),
)
def export(params: Annotated[Export, Query()], services: ServicesDep) -> StreamingResponse:
    """All records that match, in the wanted order."""
    query = params.query(services.store, MAX_LIMIT, None)
    found = _pages(services.store, query)
    try:
        pages = chain([next(found)], found)  # what is wrong is said before the first byte
    except TooSlowError as error:
        raise HTTPException(422, f"sort: {error}") from error
    as_csv = params.format == "csv"
    return StreamingResponse(
        _csv(pages) if as_csv else map(msgspec.json.Encoder().encode_lines, pages),
        media_type="text/csv; charset=utf-8" if as_csv else "application/x-ndjson",
        headers={
            "Content-Disposition": f'attachment; filename="kvlens-requests.{params.format}"',
        },
    )


def _pages(store: Store, query: RequestQuery) -> Iterator[list[RequestRecord]]:
    while True:
        page = store.requests(query)
        yield page.records
        if page.next_cursor is None:
            return
        query = msgspec.structs.replace(query, cursor=page.next_cursor)


def _csv(pages: Iterable[list[RequestRecord]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for records in pages:
        writer.writerows([_cell(getattr(one, name)) for name in COLUMNS] for one in records)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _cell(value: object) -> object:
    """Text from outside must not become a formula in the program that opens the file."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return "" if value is None else value
