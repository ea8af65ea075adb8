"""``/api/v1/targets``: which servers are scraped, and how that goes."""

from __future__ import annotations

from fastapi import APIRouter, Request

from kvlens.dashboard.api.shapes import JSON
from kvlens.dashboard.ingest.scraper import Scraper

router = APIRouter(prefix="/api/v1", tags=["read"], default_response_class=JSON)


@router.get("/targets", summary="Scrape targets")
def targets(request: Request) -> JSON:
    """Each with its state, the last scrape and its error."""
    scraper: Scraper = request.app.state.scraper
    return JSON({"targets": scraper.status})
