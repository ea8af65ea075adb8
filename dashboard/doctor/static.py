"""Findings from how an engine is set up: true before any request is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvlens.dashboard.model.scrape import Reading
from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.scrape.findings import Finding, percent
from kvlens.dashboard.scrape.window import Window
from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import Cause, Confidence, GroupKind, IncidentKind, Severity, Verdict
from kvlens.telemetry.verdict.oracle import servable_boundary

_PROBES: Final = 100
"""Questions to a persistent tier after which no answer is remarkable."""
_NOTABLE_SHARE: Final = 0.05
"""Share of prompts that can never be served from which that is worth a word."""
_NOTABLE_TOKENS: Final = 1024
"""The same without traffic: shortest prompt that can be served."""
_RANDOM_HASHES: Final = frozenset({"xxhash", "xxhash_cbor"})
"""Algorithms with which vLLM seeds block hashes at random unless PYTHONHASHSEED is set."""
_FIXED_SINCE: Final = (0, 29)
"""vLLM from which every hash but these is seeded alike in all processes (0.28.0 was not)."""
_NO: Final = ("false", "random", "no", "0")


def layout_of(reading: Reading) -> Layout | None:
    """The groups as ``kvlens_info`` tells them (no windows); None on a stock engine."""
    groups = []
    drafters = set(filter(None, reading.info.get("drafter_groups", "").split(",")))
    for part in filter(None, reading.info.get("layout", "").split(",")):
        index, _, rest = part.partition(":")
        kind, _, size = rest.partition("/")
        if not index.isdecimal() or not size.isdecimal() or not int(size):
            return None
        chunk = int(size)
        windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
        groups.append(
            GroupLayout(
                kv_group=int(index),
                group_kind=kind,
                tokens_per_block=chunk,
                tokens_per_chunk=chunk,
                window=chunk if windowed else None,
                drafter=index in drafters,
                drafter_used=index in drafters,
            )
        )
    return Layout(groups=groups, tokens_per_hash=1) if groups else None


def every_group_a_drafter(window: Window, limits: Thresholds) -> Finding | None:
    """The fingerprint of the drafter fallback: each group gives up its last chunk."""
    layout = layout_of(window.after)
    if layout is None or len(layout.groups) < 2:
        return None
    if not all(group.drafter_used for group in layout.groups):
        return None
    info = window.after.info
    return Finding(
        kind=str(Cause.DRAFTER_FALLBACK),
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        status=str(Verdict.LOST),
        cause=str(Cause.DRAFTER_FALLBACK),
        summary=f"all {len(layout.groups)} KV-cache groups are treated as drafter groups, so that "
        f"each gives up its last matched chunk; a group that needs one chunk is left with none",
        evidence={
            "drafter_groups": info.get("drafter_groups", ""),
            "layout": info.get("layout", ""),
            "vllm_version": info.get("vllm_version", ""),
        },
        next_step='Load KVLensOffloadingConnector with "kvlens": {"lookup": "corrected"} in '
        "kv_connector_extra_config, or upgrade vLLM to 0.30.0 or newer.",
    )


def chunks_that_cannot_meet(window: Window, limits: Thresholds) -> Finding | None:
    """Chunk sizes that leave prompts of usual length without any boundary (F6)."""
    layout = layout_of(window.after)
    if layout is None:
        return None
    sizes = sorted({group.tokens_per_chunk for group in layout.groups})
    shortest = shortest_served(layout)
    if len(sizes) < 2 or shortest <= sizes[0] + 1:
        return None
    never, asked = _prompts_below(window.after, shortest), _prompts_below(window.after, None)
    if asked:
        if never < _NOTABLE_SHARE * asked:
            return None
    elif shortest < _NOTABLE_TOKENS:
        return None
    share = f", which is {percent(never, asked)} of the prompts so far" if asked else ""
    return Finding(
        kind=str(Cause.CHUNK_GRANULARITY),
        severity=Severity.WARNING,
        confidence=Confidence.CERTAIN,
        status=str(Verdict.COLD),
        cause=str(Cause.CHUNK_GRANULARITY),
        summary=f"prompts under {shortest:,} tokens can never be served, whatever the pool: the "
        f"groups' chunks of {', '.join(f'{size:,}' for size in sizes)} tokens have no boundary in "
        f"common before{share}",
        evidence={
            "chunk_tokens": sizes,
            "shortest_served_prompt": shortest,
            "prompts_never_served": int(never),
            "prompts": int(asked),
        },
        next_step=f"Lower block_size or blocks_per_chunk in kv_connector_extra_config (largest "
        f"chunk now: {sizes[-1]:,} tokens), if prompts of this length matter.",
    )


def shortest_served(layout: Layout) -> int:
    """Tokens of the shortest prompt that can be served if all of it is stored."""

    def served(tokens: int) -> bool:
        return servable_boundary(layout, lambda group, chunk: True, 0, tokens) > 0

    low, high = 0, max(group.tokens_per_chunk for group in layout.groups)
    while not served(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if served(middle) else (middle, high)
    return high


def pool_too_small(window: Window, limits: Thresholds) -> Finding | None:
    """A pool that does not even hold the longest prompt (F9)."""
    layout, capacity = layout_of(window.after), window.after.capacity_chunks
    longest = _longest_prompt(window.after)
    if layout is None or not capacity or not longest:
        return None
    # The least it takes: windows and states may do with one chunk each.
    needed = sum(
        longest // group.tokens_per_chunk
        if group.group_kind == GroupKind.FULL_ATTENTION
        else min(1, longest // group.tokens_per_chunk)
        for group in layout.groups
    )
    if needed <= capacity:
        return None
    return Finding(
        kind=str(Cause.CAPACITY),
        severity=Severity.WARNING,
        confidence=Confidence.CERTAIN,
        status=str(Verdict.EVICTED),
        cause=str(Cause.CAPACITY),
        summary=f"a prompt of over {longest:,} tokens was served, which needs at least {needed:,} "
        f"slots of the tier; it has {capacity:,.0f}",
        evidence={
            "longest_prompt_at_least": longest,
            "slots_needed": needed,
            "capacity_chunks": int(capacity),
        },
        next_step="Enlarge the pool (--kv-offloading-size or cpu_bytes_to_use) beyond what the "
        "longest prompt takes, times the number of prompts between two uses of the same one.",
    )


def random_hash_seed(window: Window, limits: Thresholds) -> Finding | None:
    """A tier that outlives the engine, under hashes that do not (F17)."""
    after = window.after
    if _seed_is_fixed(after):
        return None
    told = after.info.get("hash_seed", ""), after.info.get("persistent_tier", "")
    probes, hits = window.rise("tier_queries"), window.rise("tier_hits")
    evidence: dict[str, object] = {"probes": int(probes), "hits": int(hits)}
    if told[0] in _NO and told[1] not in ("", *_NO):
        confidence, why = Confidence.CERTAIN, "PYTHONHASHSEED is not set"
    elif window.restarted and probes >= _PROBES and not hits and window.earlier("tier_queries"):
        confidence = Confidence.LIKELY
        why = f"none of {probes:,.0f} chunks asked for since the restart was found in it"
    elif after.hash_algorithm in _RANDOM_HASHES and window.has("tier_queries") and not hits:
        confidence = Confidence.GUESS
        why = f"{after.hash_algorithm} is seeded at random unless PYTHONHASHSEED is set"
        evidence["prefix_caching_hash_algo"] = after.hash_algorithm
    else:
        return None
    return Finding(
        kind=str(Cause.HASH_SEED),
        severity=Severity.WARNING,
        confidence=confidence,
        status=str(Verdict.COLD),
        cause=str(Cause.HASH_SEED),
        summary=f"a tier outlives the engine, but {why}: each start hashes the same prompt "
        f"differently, and nothing stored before can be found",
        evidence=evidence,
        next_step="Start every engine that shares this tier with the same PYTHONHASHSEED (0, for "
        "example); what was stored under other hashes cannot be found again.",
    )


def _seed_is_fixed(after: Reading) -> bool:
    """Whether this vLLM hashes alike in every process, PYTHONHASHSEED or not (N14).

    A page without kvlens names no version: supported ones mostly are, so that silence is right.
    """
    algorithm, version = after.hash_algorithm, after.info.get("vllm_version", "")
    if not algorithm.startswith("sha256"):
        return False
    parts = version.split(".")[:2]
    if len(parts) == len(_FIXED_SINCE) and all(part.isdecimal() for part in parts):
        return tuple(map(int, parts)) >= _FIXED_SINCE
    return True


def unsafe_layout(window: Window, limits: Thresholds) -> Finding | None:
    """Recurrent groups beside chunks of another size, under vLLM's own search (F12, F13, F20)."""
    layout = layout_of(window.after)
    if layout is None or window.after.info.get("lookup") != "stock":
        return None
    sizes = sorted({group.tokens_per_chunk for group in layout.groups})
    recurrent = any(group.group_kind == GroupKind.MAMBA for group in layout.groups)
    if not recurrent or len(sizes) < 2:
        return None
    return Finding(
        kind=str(IncidentKind.UNSAFE_BOUNDARY),
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        status=str(Verdict.UNSAFE),
        cause=str(Cause.MISALIGNED_STATE),
        summary=f"recurrent groups beside chunks of other sizes "
        f"({', '.join(f'{size:,}' for size in sizes)} tokens): vLLM's own search may serve a "
        f"boundary at which no recurrent state was stored",
        evidence={"chunk_tokens": sizes, "lookup": "stock"},
        next_step='Set "kvlens": {"lookup": "corrected"} or "exact" in kv_connector_extra_config: '
        "neither serves such a boundary.",
    )


def _prompts_below(reading: Reading, tokens: int | None) -> float:
    """Prompts so far that surely had fewer tokens; all of them for None."""
    edges = [edge for edge in reading.prompt_lengths if tokens is None or edge < tokens]
    return reading.prompt_lengths[max(edges)] if edges else 0.0


def _longest_prompt(reading: Reading) -> int:
    """Tokens that the longest prompt so far surely had."""
    edges = sorted(reading.prompt_lengths)
    most = reading.prompt_lengths[edges[-1]] if edges else 0.0
    below = [edge for edge in edges if reading.prompt_lengths[edge] < most]
    return int(below[-1]) if below else 0


StaticCheck = Callable[[Window, Thresholds], "Finding | None"]
STATIC: Final[tuple[StaticCheck, ...]] = (
    every_group_a_drafter, chunks_that_cannot_meet, pool_too_small, random_hash_seed,
    unsafe_layout,
)  # fmt: skip
