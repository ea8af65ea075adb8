"""Numbers on a page that mislead: which of them were not used, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlens.dashboard.scrape import names, signs
from kvlens.dashboard.scrape.window import Window

_ALL: Final = 0.98
"""External hits of queries from which the server decodes what another one prefilled."""
_FASTER: Final = 0.7
"""Time to the first token against before, from which repeats are surely found somewhere."""
_FEW: Final = 20
"""Requests needed on both sides to compare it."""


@dataclass(frozen=True)
class Unused:
    """One number that was left out."""

    series: str
    reason: str


def unused(window: Window) -> list[Unused]:
    """What was left out of one engine's examination."""
    found = [
        Unused(name.replace("_", ":", 1), "it counts the chunks that transfers pin just now (vLLM "
               "0.27.1 to 0.34): near 0 in a full tier, so it is no occupancy")
        for name in window.after.pinned
    ]  # fmt: skip
    found += [*_hit_rate(window), *_local_hits(window), *_deprecated(window)]
    return found


def _hit_rate(window: Window) -> list[Unused]:
    asked = window.rise("external_queries")
    if not asked or signs.hits(window) < _ALL * asked:
        return []
    return [
        Unused(
            "vllm:external_prefix_cache_hits",
            "of what was asked, nearly all were hits: normal where another server prefills, so "
            "that it says nothing of how well a tier is used",
        )
    ]


def _local_hits(window: Window) -> list[Unused]:
    """Local hits that stay 0 though prompts are found again."""
    if not window.rise("local_queries") or window.rise("local_hits"):
        return []
    name = "vllm:prefix_cache_hits"
    if by_source := signs.local_hits(window):
        return [
            Unused(
                name, f"it stays at 0, while vllm:prompt_tokens_by_source counts {by_source:,.0f} "
                f"tokens from the GPU cache: that one was used"
            )
        ]  # fmt: skip
    before, now = _first_token(window, earlier=True), _first_token(window, earlier=False)
    if before is None or now is None or now > _FASTER * before:
        return []
    return [
        Unused(
            name, f"it stays at 0, but the mean time to the first token fell from {before:.2f} s "
            f"to {now:.2f} s: prompts may well be found again, so it proves no lack of reuse"
        )
    ]  # fmt: skip


def _first_token(window: Window, earlier: bool) -> float | None:
    """Mean seconds to the first token, before the window or in it."""
    take = window.earlier if earlier else window.rise
    count = take("first_tokens")
    return take("first_token_seconds") / count if count >= _FEW else None


def _deprecated(window: Window) -> list[Unused]:
    if not window.after.deprecated:
        return []
    return [
        Unused(
            names.DEPRECATED_BYTES.replace("_", ":", 1),
            "it counts the same bytes as kv_offload_store_bytes and kv_offload_load_bytes: the "
            "larger of both was used, never their sum",
        )
    ]
