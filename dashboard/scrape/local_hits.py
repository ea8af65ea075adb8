"""``local_hits_lost``: the GPU's own prefix cache gives nothing, though nothing was evicted.

Prefixes are lost there too: a drafter group gives up its last block, and on a
model with windows the cache may find none of a prompt longer than a share of
its pool. Counters show neither the prompt nor the block, so this is a guess.
"""

from __future__ import annotations

from typing import Final

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import signs
from kvlens.dashboard.scrape.findings import Finding, Outcome, fine, found, unknown
from kvlens.dashboard.scrape.window import Window
from kvlens.telemetry.semconv import Confidence, IncidentKind, Severity, Verdict

KIND: Final = IncidentKind.LOCAL_HITS_LOST
POOL_SHARE: Final = 0.25
"""Share of the GPU's pool beyond which a reported model with windows found nothing again."""
_LONG_PROMPTS: Final = 20
"""Long prompts needed to say that none of them found anything."""
_TRANSFERRED: Final = 0.98
"""External hits of queries from which the server decodes for another that prefilled."""


def check(window: Window, limits: Thresholds) -> Outcome:
    """Whether local hits stopped, or stop at a length, while nothing else explains it."""
    asked, given = window.rise("local_queries"), signs.local_hits(window)
    if not window.after.vllm or not window.has("local_queries"):
        return unknown(KIND, "no prefix cache of vLLM's is on this page")
    if window.restarted:
        return unknown(KIND, signs.RESTARTED)
    said = f"{given:,.0f} of {asked:,.0f} tokens came from the GPU's prefix cache"
    if asked < signs.MUCH * limits.scrape_queries_tokens:
        return unknown(KIND, f"{said}: too few to tell")
    external = window.rise("external_queries")
    if external and signs.hits(window) >= _TRANSFERRED * external:
        return fine(KIND, "prompts come with their KV from another server, so none is found here")
    why = _stopped(window, limits) if not given else None
    why = why or _beyond_a_share(window, limits)
    if why is None:
        return fine(KIND, said)
    # Where the tier serves the same prompts, they surely came back.
    sure = window.after.windows and signs.hits(window) > 0
    return found(
        Finding(
            kind=str(KIND),
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY if sure else Confidence.GUESS,
            status=str(Verdict.LOST),
            summary=f"{said}: {why}",
            evidence={
                "local_queries": int(asked),
                "local_hits": int(given),
                "pool_tokens": window.after.gpu_tokens,
                "gpu_cache_usage": window.usage,
                "windows": window.after.windows,
                "long_prompts": int(_longer(window.after.prompt_lengths, _edge(window))),
                "seconds": window.seconds,
            },
            next_step="This is the GPU's own cache, no fault of the offload tier. Send one prompt "
            "twice, first shorter and then longer than a quarter of the pool, and compare the "
            "times to the first token. If only the short one is found again, enlarge the pool "
            "(--gpu-memory-utilization) and report it to vLLM with both times. If it began with "
            "speculative decoding, switch that off or go to vLLM 0.34 or newer, whose lookahead "
            "hashes keep the drafter's last block.",
        )
    )


def _stopped(window: Window, limits: Thresholds) -> str | None:
    """Hits that were there before, and are none at all now."""
    before = signs.share_before(window, limits)
    if before is None or signs.evicts(window, limits) is not None:
        return None
    return f"{before:.0%} did before, and nothing shows that the cache evicts"


def _beyond_a_share(window: Window, limits: Thresholds) -> str | None:
    """No prompt beyond a quarter of the pool had a hit, while shorter ones had, or the tier did."""
    edge, after = _edge(window), window.after
    if edge is None or not after.computed_lengths:
        return None
    long = _longer(after.prompt_lengths, edge)
    edges = [known for known in after.prompt_lengths if known >= edge]
    if long < _LONG_PROMPTS or any(
        _longer(after.computed_lengths, known) < _longer(after.prompt_lengths, known)
        for known in edges
    ):
        return None
    # Unique long prompts look alike: something must show that these come back.
    reuse = signs.reuse(window, limits)
    tier = signs.hits(window)
    if not tier and (reuse is None or not after.windows):
        return None
    shown = f"the tier served {tier:,.0f} tokens" if tier else str(reuse)
    return (
        f"none of the {long:,.0f} prompts beyond {edge:,.0f} tokens, a quarter of the pool of "
        f"{after.gpu_tokens or 0:,.0f}, found anything, while {shown}"
    )


def _edge(window: Window) -> float | None:
    """Least edge of the lengths' histogram at or beyond a quarter of the pool."""
    pool = window.after.gpu_tokens
    if not pool:
        return None
    return min((e for e in window.after.prompt_lengths if e >= POOL_SHARE * pool), default=None)


def _longer(counts: dict[float, float], edge: float | None) -> float:
    """Prompts longer than ``edge``, as far as finite buckets tell."""
    if edge is None or edge not in counts:
        return 0.0
    return max(counts.values()) - counts[edge]
