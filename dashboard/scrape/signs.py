"""What counters show of a server's caches: hits, stores, evictions, prefixes that come back.

Shared by the checks that infer; each says in words what it goes by.
"""

from __future__ import annotations

from typing import Final

from kvlens.dashboard.model.scrape import SOURCE
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape import connectors
from kvlens.dashboard.scrape.findings import percent
from kvlens.dashboard.scrape.window import Window
from kvlens.dashboard.view.format import size

TURNOVER: Final = 2.0
"""GPU caches full of new tokens after which older ones must have been evicted."""
HALF_USED: Final = 0.5
"""Below this much use even that is doubted: silence is cheaper than a false alarm."""
MUCH: Final = 20
"""Multiples of the least queries that cannot be a warm-up any more."""
PREEMPTED_TOKENS: Final = 4096
"""Tokens of its own that a preempted request may find again, where lengths are not known.

Of reported preemption storms the mean was below 2,000; twice that errs towards silence.
"""
RESTARTED: Final = "the server restarted in between: its caches began empty"
_PREFILL_TOKENS: Final = 1.1
"""Tokens generated per request below which a server only prefills (one each)."""
_PREFILL_REQUESTS: Final = 20
"""Requests needed to say so."""


def hits(window: Window) -> float:
    """Tokens that the connector gave; vLLM's tokens by source stand in for a counter at 0."""
    return window.rise("external_hits") or window.rise(SOURCE + "external_kv_transfer")


def local_hits(window: Window) -> float:
    """Tokens that the GPU cache gave, by the same rule."""
    return window.rise("local_hits") or window.rise(SOURCE + "local_cache_hit")


def loads(window: Window) -> float:
    """What was loaded, in bytes, or in whatever the other connector counts."""
    return window.rise("load_bytes") + window.rise(connectors.LOADED)


def stored(window: Window) -> float | None:
    """What was stored since the beginning, in whatever unit; None if no series tells."""
    if not tells_stores(window):
        return None
    ours = max(window.rise("store_bytes"), window.rise("tier_write_bytes"))
    return ours + window.rise(connectors.STORED)


def tells_stores(window: Window) -> bool:
    """Whether the page would show stores: a series of them, or vLLM's own connector."""
    after = window.after
    return after.offloading or window.has("store_bytes") or after.stores_elsewhere


def stored_text(window: Window) -> str:
    """The same for people."""
    if (amount := window.rise("store_bytes")) > 0:
        return size(amount)
    unit = connectors.UNITS.get(window.after.other, "chunks")
    return f"{window.rise(connectors.STORED):,.0f} {unit} ({window.after.other})"


def short(window: Window, limits: Thresholds) -> str | None:
    """Why the window is too short to tell; None if it is not."""
    asked = window.rise("external_queries")
    if window.restarted:
        return RESTARTED
    if asked < limits.scrape_queries_tokens:
        return (
            f"only {asked:,.0f} tokens were asked of the tier "
            f"(at least {limits.scrape_queries_tokens:,} are needed)"
        )
    if window.seconds is not None and window.seconds < 0.9 * limits.scrape_window_seconds:
        return (
            f"{window.seconds:.0f} s are too short to tell "
            f"({limits.scrape_window_seconds:.0f} s are needed)"
        )
    return None


def prefills_only(window: Window) -> str | None:
    """How it shows that the server only prefills for others, and so never loads."""
    requests, tokens = window.rise("requests"), window.rise("generated_tokens")
    if requests >= _PREFILL_REQUESTS and 0 < tokens <= _PREFILL_TOKENS * requests:
        return f"{requests:,.0f} requests generated {tokens:,.0f} tokens: it prefills for others"
    return None


def local_share(window: Window) -> float | None:
    """Local hits of local queries; None without queries."""
    asked = window.rise("local_queries")
    return local_hits(window) / asked if asked > 0 else None


def answers_itself(window: Window, limits: Thresholds) -> str | None:
    """That the GPU cache gives nearly all of each prompt, so that the rest is its new end."""
    share = local_share(window)
    if share is None or share < limits.scrape_local_answers:
        return None
    return f"the GPU cache answers {share:.1%} of all prompts itself: what is left is new"


def evicts(window: Window, limits: Thresholds) -> str | None:
    """How it shows that the GPU cache evicts; None if it does not."""
    usage = window.usage
    if usage is not None and usage >= limits.scrape_gpu_usage:
        return f"the GPU cache was full to {usage:.0%}"
    if preemptions := window.rise("preemptions"):
        return f"{preemptions:,.0f} requests were preempted for want of GPU cache"
    if evictions := window.rise("gpu_evictions"):
        unit = "blocks" if window.after.vllm else "tokens"
        return f"at least {evictions:,.0f} {unit} were evicted from the GPU cache"
    now, before = local_share(window), share_before(window, limits)
    # Eviction leaves some hits: none at all is another fault, local_hits_lost.
    if now and before is not None and now < before / 2:
        return f"local hits fell from {before:.0%} to {now:.0%}"
    new = window.rise("local_queries") - local_hits(window)
    room = window.after.gpu_tokens
    if room and new >= TURNOVER * room and (usage is None or usage >= HALF_USED):
        return f"{new:,.0f} new tokens passed through a GPU cache of {room:,.0f}"
    return None


def reuse(window: Window, limits: Thresholds) -> str | None:
    """How it shows that prompts have prefixes in common; None if it does not.

    A preempted request finds its own blocks again: those are taken off first.
    """
    asked = window.rise("local_queries")
    others = local_hits(window) - own_blocks(window, window.rise("preemptions"))
    if asked > 0 and others >= limits.scrape_local_share * asked:
        return f"prefixes do come back ({percent(local_hits(window), asked)} local hits)"
    before = share_before(window, limits)
    return None if before is None else f"prefixes did come back before ({before:.1%} local hits)"


def no_reuse(window: Window) -> str:
    """Why :func:`reuse` does not see any."""
    if (found := local_hits(window)) > 0 and (preemptions := window.rise("preemptions")):
        return (
            f"the {found:,.0f} local hits may be own blocks of the {preemptions:,.0f} preempted "
            f"requests: nothing shows that a prompt came back"
        )
    return (
        "no prompt had a prefix in common with an earlier one, as far as local hits show: there "
        "may be nothing to serve"
    )


def own_blocks(window: Window, preemptions: float) -> float:
    """Tokens that so many preempted requests may have found again of their own."""
    prompts, tokens = window.rise("prompts"), window.rise("prompt_tokens")
    return preemptions * (tokens / prompts if prompts and tokens else PREEMPTED_TOKENS)


def share_before(window: Window, limits: Thresholds) -> float | None:
    """Local hits of queries until the window, if that is a share worth speaking of."""
    asked = window.earlier("local_queries")
    if asked < limits.scrape_queries_tokens or window.restarted:
        return None
    own = own_blocks(window, window.earlier("preemptions"))
    share = (window.earlier("local_hits") - own) / asked
    return share if share >= 2 * limits.scrape_local_share else None


def warm(window: Window, limits: Thresholds) -> bool:
    """Whether the tier had something to serve before the window ended."""
    if window.earlier("store_bytes") > 0 or window.earlier(connectors.STORED) > 0:
        return True
    if window.before is None and (window.seconds or 0.0) >= limits.scrape_window_seconds:
        return True
    late = tells_stores(window) and window.earlier("external_queries")
    if window.seconds is not None and late and late >= limits.scrape_queries_tokens:
        return False  # it was asked before, and began to store only in this window
    asked, room = window.rise("external_queries"), window.after.gpu_tokens
    return asked >= MUCH * limits.scrape_queries_tokens or bool(room and asked >= 3 * room)
