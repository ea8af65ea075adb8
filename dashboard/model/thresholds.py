"""Thresholds of all detectors: one set for all models, and what a model changes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic import BaseModel, ConfigDict, Field


class Thresholds(BaseModel):
    """Numbers that decide when an incident opens. Times are seconds, shares 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    eligible_min_tokens: int = Field(default=256, ge=1)
    """A request counts from this many expected tokens on (or one chunk)."""

    zero_hit_requests: int = Field(default=3, ge=2)
    """Shortest run of eligible requests with nothing served that can be an incident."""
    zero_hit_window_seconds: float = Field(default=1800.0, gt=0)
    """Requests of the run are at most this much older than its newest."""
    zero_hit_accident: float = Field(default=1e-6, gt=0, lt=1)
    """The run must be less probable than this at the engine's own earlier rate."""
    zero_hit_recovery: int = Field(default=10, ge=1)
    """Eligible requests served in a row that close the incident."""

    lost_hits_share: float = Field(default=0.1, gt=0, lt=1)
    """``lost_hits``: lost of expected tokens; closes at half of it."""
    lost_hits_requests: int = Field(default=3, ge=1)
    """Requests of the window that lost something."""
    lost_hits_window_seconds: float = Field(default=300.0, gt=0)
    """Time over which the share is taken."""

    store_gaps_chunks: int = Field(default=3, ge=1)
    """``store_gaps``: gaps met by requests within the window."""
    store_gaps_window_seconds: float = Field(default=1800.0, gt=0)
    """Time over which gaps are counted, and without any that closes the incident."""

    capacity_thrash_share: float = Field(default=0.5, gt=0, lt=1)
    """``capacity_thrash``: evicted of all reused tokens; closes at half of it."""
    capacity_thrash_requests: int = Field(default=3, ge=1)
    """Requests of the window whose chunks were evicted before they came back."""
    capacity_thrash_prompt_share: float = Field(default=0.25, gt=0)
    """One such request is enough if its prompt alone takes this share of the tier."""
    capacity_thrash_window_seconds: float = Field(default=1800.0, gt=0)
    """Time over which the share is taken."""

    deferral_stall_seconds: float = Field(default=10.0, gt=0)
    """``deferral_stall``: a lookup has waited longer than this."""
    deferral_stall_requests: int = Field(default=3, ge=1)
    """Stalled requests from which the incident is critical."""
    deferral_stall_window_seconds: float = Field(default=300.0, gt=0)
    """Time without a stall that closes the incident."""

    slow_reload_factor: float = Field(default=2.0, gt=1)
    """``slow_reload``: 95th percentile against that of the engine's earlier loads."""
    slow_reload_loads: int = Field(default=30, ge=10)
    """Loads needed on both sides."""
    slow_reload_window_seconds: float = Field(default=300.0, gt=0)
    """Loads that count as recent."""
    slow_reload_accident: float = Field(default=1e-6, gt=0, lt=1)
    """The slow loads must be less probable than this among so many earlier ones."""

    store_failures_share: float = Field(default=0.01, ge=0, lt=1)
    """``store_failures``: refused or failed of all store decisions; closes at half of it."""
    store_failures_count: int = Field(default=10, ge=1)
    """Refused or failed store decisions of the window."""
    store_failures_window_seconds: float = Field(default=300.0, gt=0)
    """Time over which the share is taken."""

    load_failures_share: float = Field(default=0.01, ge=0, lt=1)
    """``load_failures``: failed of all loads; closes at half of it."""
    load_failures_count: int = Field(default=2, ge=1)
    """Failed loads of the window."""
    load_failures_window_seconds: float = Field(default=300.0, gt=0)
    """Time over which the share is taken."""

    telemetry_lost_window_seconds: float = Field(default=600.0, gt=0)
    """``telemetry_lost``: time without a new loss that closes the incident."""

    version_regression_drop: float = Field(default=0.02, ge=0, lt=1)
    """``version_regression``: how far the served share must have fallen, at the least."""
    version_regression_requests: int = Field(default=30, ge=10)
    """Eligible requests needed of each version, after weighting."""
    version_regression_error: float = Field(default=1e-3, gt=0, lt=1)
    """Probability of a false alarm over the whole life of a version."""

    scrape_window_seconds: float = Field(default=600.0, ge=60)
    """Scraped counters: time over which they are compared, and needed since a start."""
    scrape_queries_tokens: int = Field(default=10_000, ge=1)
    """Tokens asked of the tier within the window, at the least."""
    scrape_gpu_usage: float = Field(default=0.9, gt=0, le=1)
    """Use of the GPU cache from which it evicts."""
    scrape_local_share: float = Field(default=0.05, gt=0, lt=1)
    """Local hits of local queries that show that prompts have prefixes in common."""
    scrape_local_answers: float = Field(default=0.9, gt=0, le=1)
    """Local hits of local queries from which the tier is asked for little but new tokens."""
    scrape_low_hits_share: float = Field(default=0.05, gt=0, lt=1)
    """``low_hits``: hits of the tokens asked of the tier."""
    scrape_silence_seconds: float = Field(default=300.0, gt=0)
    """A target that answered before and has not for this long: ``telemetry_lost``."""


ThresholdsFor = Callable[[str], Thresholds]
"""Thresholds by model name."""

_DEFAULTS: Final = Thresholds()


def defaults(_model: str) -> Thresholds:
    """The same thresholds for every model: their defaults."""
    return _DEFAULTS
