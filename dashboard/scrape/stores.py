"""``nothing_stored`` and ``low_hits``: a tier that holds nothing, or gives hardly any back."""

from __future__ import annotations

from typing import Any, Final

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import connectors, signs
from kvlens.dashboard.scrape.findings import Finding, Outcome, fine, found, percent, unknown
from kvlens.dashboard.scrape.window import Window
from kvlens.dashboard.view.format import size
from kvlens.telemetry.semconv import Cause, Confidence, IncidentKind, Severity, Verdict

NOTHING_STORED: Final = IncidentKind.NOTHING_STORED
LOW_HITS: Final = IncidentKind.LOW_HITS
_LASTS: Final = 100
"""Multiples of the least queries that stand for a full window where its time is not known."""
_LEAST_LOADED: Final = 0.1
"""Loaded of stored bytes above which a tier is used well, whatever share the hits are."""
_SAME_SIZE: Final = 0.9
"""Share of the loads in one bucket from which all are said to be of one size."""


def nothing_stored(window: Window, limits: Thresholds) -> Outcome:
    """A connector is asked, and has never stored anything since the server's start."""
    if not signs.tells_stores(window):
        return unknown(NOTHING_STORED, "no series on this page tells what was stored")
    after = window.after.counters
    names = ("store_bytes", "tier_write_bytes", "stored_chunks", connectors.STORED)
    if any(after.get(name, 0.0) > 0 for name in names):
        return fine(NOTHING_STORED, "something was stored since the start")
    hits, loads = signs.hits(window), signs.loads(window)
    if hits > 0 or loads > 0:
        return fine(NOTHING_STORED, f"{hits:,.0f} tokens were hits: somebody stores")
    asked = window.rise("external_queries")
    if asked < signs.MUCH * limits.scrape_queries_tokens:
        return unknown(
            NOTHING_STORED, f"only {asked:,.0f} tokens were asked of the tier so far "
            f"(at least {signs.MUCH * limits.scrape_queries_tokens:,} are needed)"
        )  # fmt: skip
    if (itself := signs.answers_itself(window, limits)) is not None:
        return fine(NOTHING_STORED, itself)
    evicts = signs.evicts(window, limits)
    if evicts is None and window.after.other not in connectors.EAGER:
        return unknown(
            NOTHING_STORED, "nothing shows that the GPU cache evicts, and a lazy connector stores "
            "only then"
        )  # fmt: skip
    return found(_nothing(window, limits, asked, evicts))


def _nothing(window: Window, limits: Thresholds, asked: float, evicts: str | None) -> Finding:
    names = ("stores_skipped", "allocation_failures", "backpressure_drops", connectors.FAILED)
    counts = {name: int(window.rise(name)) for name in names}
    cause, why = _why_nothing(counts)
    lasts = (
        window.seconds >= 0.9 * limits.scrape_window_seconds
        if window.seconds is not None
        else asked >= _LASTS * limits.scrape_queries_tokens
    )
    # A threshold that skips every store is a setting that somebody chose.
    chosen = cause is Cause.POLICY
    while_full = f", while {evicts}" if evicts else ""
    return Finding(
        kind=str(NOTHING_STORED),
        severity=Severity.CRITICAL if lasts and not chosen else Severity.WARNING,
        confidence=Confidence.CERTAIN if window.has("store_bytes") else Confidence.LIKELY,
        status=str(Verdict.UNSTORED),
        cause=None if cause is None else str(cause),
        summary=f"{asked:,.0f} tokens were asked of the tier, and nothing was ever stored in it"
        f"{while_full}{why}",
        evidence={
            "external_queries": int(asked),
            "external_hits": 0,
            "stored": 0,
            **counts,
            "connector": window.after.other or "OffloadingConnector",
            "gpu_cache_usage": window.usage,
            "local_hits": int(signs.local_hits(window)),
            "local_queries": int(window.rise("local_queries")),
            "seconds": window.seconds,
        },
        next_step="Look, in this order: at the store policy (store_threshold, offload_prompt_only, "
        "max_offload_tokens, kv_role: a kv_consumer stores nothing); at the chunk, which no prompt "
        "may fill (block_size, blocks_per_chunk); at lazy offload, which stores only what the GPU "
        "cache is about to evict; then at the engine's log for failed stores.",
    )


def _why_nothing(counts: dict[str, int]) -> tuple[Cause | None, str]:
    if skipped := counts["stores_skipped"]:
        return Cause.POLICY, f": {skipped:,} chunks were skipped for store_threshold"
    if failed := counts["allocation_failures"] + counts[connectors.FAILED]:
        return Cause.ALLOCATION_FAILURE, f": {failed:,} stores found no room or failed"
    if dropped := counts["backpressure_drops"]:
        return Cause.POLICY, f": {dropped:,} stores were dropped, since the tier is too slow"
    return None, ""


def low_hits(window: Window, limits: Thresholds) -> Outcome:
    """Something is loaded, but hardly any of what is asked for and of what was stored."""
    kind = LOW_HITS
    if window.after.instrumented:
        return fine(kind, "kvlens' own counters tell what was due: see lost_hits")
    hits, loads = signs.hits(window), signs.loads(window)
    asked, stored = window.rise("external_queries"), signs.stored(window)
    if (short := signs.short(window, limits)) is not None:
        return unknown(kind, short)
    share = hits / asked
    said = f"{hits:,.0f} of {asked:,.0f} tokens asked of the tier were hits ({share:.1%})"
    if share >= limits.scrape_low_hits_share:
        return fine(kind, said)
    if not hits or not loads or hits < limits.eligible_min_tokens:
        return unknown(kind, f"{said}: with none it is zero_hit's to judge")
    if not stored or loads >= _LEAST_LOADED * stored:
        return fine(kind, f"{said}, but what is stored is loaded")
    if (itself := signs.answers_itself(window, limits)) is not None:
        return fine(kind, itself)
    evicts = signs.evicts(window, limits)
    if evicts is None:
        return fine(kind, f"{said}, and nothing shows that the GPU cache evicts")
    if not signs.warm(window, limits):
        return unknown(kind, f"{said}, but the tier may still be filling")
    return found(_low(window, said, evicts, hits))


def _low(window: Window, said: str, evicts: str, hits: float) -> Finding:
    jobs, size_text = window.rise("load_jobs"), _one_size(window)
    requests = window.rise("requests")
    stored, loads = signs.stored(window) or 0.0, signs.loads(window)
    in_bytes = window.has("store_bytes")
    amounts = (size(stored), size(loads)) if in_bytes else (f"{stored:,.0f}", f"{loads:,.0f}")
    evidence: dict[str, Any] = {
        "external_queries": int(window.rise("external_queries")),
        "external_hits": int(hits),
        "hit_ratio": round(hits / window.rise("external_queries"), 6),
        "stored": int(stored),
        "loaded": int(loads),
        "load_ratio": round(loads / stored, 6),
        "tokens_per_load": int(hits / jobs) if jobs else None,
        "tokens_per_request": int(hits / requests) if requests else None,
        "tier_queries": int(window.rise("tier_queries")),
        "tier_hits": int(window.rise("tier_hits")),
        "gpu_cache_usage": window.usage,
        "seconds": window.seconds,
    }
    return Finding(
        kind=str(LOW_HITS),
        severity=Severity.WARNING,
        confidence=Confidence.GUESS,
        status=str(Verdict.PARTIAL),
        summary=f"{said}, and {amounts[1]} were loaded of {amounts[0]} stored "
        f"({percent(loads, stored)}), while {evicts}{size_text}",
        evidence=evidence,
        next_step="It may mean that prompts share no more than a short head (then nothing is "
        "wrong), that chunks are missing behind a fixed number of tokens (each request gets the "
        "same few thousand), or that the tier evicts before reuse. Load KVLensOffloadingConnector "
        "with lookup: stock, which changes nothing and tells which one; of any other connector, "
        "send one long prompt twice and compare what it loads.",
    )


def _one_size(window: Window) -> str:
    """A word if nearly all loads are of one size, so that something cuts them off."""
    counts = window.after.load_sizes
    total = max(counts.values(), default=0.0)
    edges = sorted(counts)
    below = [0.0, *(counts[edge] for edge in edges)]
    most = max((counts[edge] - below[n] for n, edge in enumerate(edges)), default=0.0)
    if total and most >= _SAME_SIZE * total:
        return f"; {most / total:.0%} of the loads were of about the same size"
    return ""
