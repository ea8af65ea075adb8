"""Which smallest change would have served what was lost.

Losses at the lookup are explained by replaying the engine's own search with
one thing changed, losses at the store by the chunks that are not there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvlens.telemetry.records import GroupLayout, Layout
from kvlens.telemetry.semconv import Cause, Confidence
from kvlens.telemetry.state.residency import State
from kvlens.telemetry.verdict.case import Case
from kvlens.telemetry.verdict.oracle import required_chunks
from kvlens.telemetry.verdict.search import search

_LISTED = 16
"""Chunk indexes listed in evidence, at most."""


@dataclass(frozen=True)
class Finding:
    """A cause with its proof; ``reason`` completes "... tokens were served: "."""

    causes: list[Cause]
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    confidence: Confidence = Confidence.CERTAIN
    vetoing_group: int | None = None
    is_tail: bool = False
    """Nothing is stored after what is missing."""
    next_step: str = ""
    """Replaces the usual next step for the cause."""


def group_name(case: Case, kv_group: int | None) -> str:
    """How texts call a group."""
    group = case.layout.by_group().get(-1 if kv_group is None else kv_group)
    return f"group {group.kv_group} ({group.group_kind})" if group else "no single group"


def lookup_finding(case: Case) -> Finding:
    """Why resident chunks were not served, by replays of the engine's search."""
    used = {g.kv_group for g in case.layout.groups if g.drafter_used}
    annotated = {g.kv_group for g in case.layout.groups if g.pop}

    def replay(drafters: set[int], widen: bool, layout: Layout = case.layout) -> int:
        return search(
            layout, case.resident, case.local, case.num_tokens, case.cap,
            drafters=drafters, widen=widen, load_window=case.load_window, load_cap=case.load_cap,
        )  # fmt: skip

    boundary = case.local + case.served
    stock = replay(used, case.widens)
    faithful = stock == boundary
    sure = Confidence.CERTAIN if faithful else Confidence.LIKELY
    evidence: dict[str, Any] = {
        "boundary": boundary,
        "servable_boundary": case.local + case.servable,
        "replayed_boundary": stock,
    }
    flags = {
        "drafter_groups_used": sorted(used),
        "drafter_groups_annotated": sorted(annotated),
        "block_drop": case.block_drop,
        "popped_groups": sorted({q.kv_group for q in case.lookups if q.popped}),
        "raw_hits": {str(q.kv_group): q.raw_hits for q in case.lookups if q.pass_number},
    }
    fewer = replay(annotated, case.widens)
    wider = replay(used, True)
    both = replay(annotated, True)
    least = max(stock, boundary)
    if max(fewer, wider, both) > least:
        alone = [
            (Cause.DRAFTER_FALLBACK, fewer > least),
            (Cause.POP_WITHOUT_WIDENING, wider > least),
        ]
        # If neither change helps alone, both are needed.
        causes = [cause for cause, helps in alone if helps] or [cause for cause, _ in alone]
        reason = _pop_reason(case, causes[0], used, annotated)
        if len(causes) > 1:
            reason += _either_or_both(fewer > least, causes[1])
        evidence |= flags | {
            "boundary_with_annotated_drafters": fewer,
            "boundary_with_wider_query": wider,
            "boundary_with_both": both,
        }
        return Finding(causes, reason, evidence, sure, case.vetoing_group)
    for group in filter(is_windowed, case.layout.groups):
        others = [other for other in case.layout.groups if other is not group]
        without = msgspec.structs.replace(case.layout, groups=others)
        if faithful and (not others or replay(used, case.widens, without) > least):
            return _window(case, group, evidence, sure)
    sizes = sorted({group.tokens_per_chunk for group in case.layout.groups})
    if faithful and len(sizes) > 1:
        evidence["chunk_tokens"] = sizes
        reason = (
            f"vLLM's search stops at {boundary:,} tokens although {case.local + case.servable:,} "
            f"are servable, since it is not exact where chunks differ in size "
            f"({', '.join(f'{size:,}' for size in sizes)} tokens)"
        )
        step = "Give all groups the same chunk size, where the model allows it."
        return Finding([Cause.CHUNK_GRANULARITY], reason, evidence, sure, case.vetoing_group,
                       next_step=step)  # fmt: skip
    evidence |= flags
    veto = case.layout.by_group().get(-1 if case.vetoing_group is None else case.vetoing_group)
    ended = f"the lookup ended as {case.exit}" if case.exit else "no lookup was seen"
    where = f" at {group_name(case, veto.kv_group)}" if veto else ""
    reason = f"they were resident, but {ended}{where}, and no change of the search explains it"
    return Finding([Cause.NOT_ATTRIBUTABLE], reason, evidence, Confidence.GUESS,
                   case.vetoing_group)  # fmt: skip


def store_finding(case: Case) -> Finding:
    """Why chunks that were computed before were not there to be served."""
    boundary = case.local + case.expected
    missing: dict[int, list[int]] = {}
    for group in case.layout.groups:
        chunks = [*(required_chunks(group, case.local, boundary) or ())]
        if group.pop:
            chunks.append(-(-boundary // group.tokens_per_chunk))
        if gone := [k for k in chunks if not case.resident(group.kv_group, k)]:
            missing[group.kv_group] = gone
    if not missing:
        reason = "all chunks are resident now; the numbers and the residency do not agree"
        return Finding([Cause.NOT_ATTRIBUTABLE], reason, {}, Confidence.GUESS)
    by_group = case.layout.by_group()
    # The group whose first gap lies lowest is the one that the others wait for.
    kv_group = min(missing, key=lambda g: (missing[g][0] * by_group[g].tokens_per_chunk, g))
    if case.vetoing_group in missing:
        kv_group = case.vetoing_group
    group, gone = by_group[kv_group], missing[kv_group]
    states = Counter(case.state(kv_group, k) for k in gone)
    after = [
        k for k in range(gone[0] + 1, group.chunks(case.num_tokens))
        if case.resident(kv_group, k)
    ]  # fmt: skip
    evidence: dict[str, Any] = {
        "kv_group": kv_group,
        "first_gap_chunk": gone[0],
        "gap_chunks": gone[:_LISTED],
        "gaps": len(gone),
        "missing_by_state": {state.name.lower(): n for state, n in sorted(states.items())},
        "resident_after_gap": len(after),
        "other_groups_complete": len(missing) == 1,
        "tokens_per_chunk": group.tokens_per_chunk,
    }
    return _why_missing(case, group, gone, states, evidence, bool(after))


def _why_missing(
    case: Case, group: GroupLayout, gone: list[int], states: Counter[State],
    evidence: dict[str, Any], after: bool,
) -> Finding:  # fmt: skip
    name, first = group_name(case, group.kv_group), gone[0]
    count = f"{len(gone):,} {'chunk' if len(gone) == 1 else 'chunks'} of {name}"

    def finding(
        cause: Cause, reason: str, confidence: Confidence = Confidence.CERTAIN, **more: Any
    ) -> Finding:
        return Finding([cause], reason, evidence | more, confidence, group.kv_group, not after)

    if states[State.REFUSED]:
        evidence |= {"slots_needed": case.slots, "capacity_chunks": case.capacity_chunks}
        if case.capacity_chunks is not None and case.slots > case.capacity_chunks:
            return finding(
                Cause.CAPACITY,
                f"the prompt needs {case.slots:,} slots and the tier has "
                f"{case.capacity_chunks:,}, so it refused {count}",
            )
        return finding(
            Cause.ALLOCATION_FAILURE,
            f"the tier refused {count} (from chunk {first} on), with no slot free or evictable "
            f"at that moment",
        )
    if failed := states[State.FAILED]:
        return finding(
            Cause.TRANSFER_FAILED,
            f"the transfer of {failed:,} {'chunk' if failed == 1 else 'chunks'} of {name} into the "
            f"tier failed (from chunk {first} on)",
        )
    if states[State.PENDING]:
        pending = states[State.PENDING]
        return finding(
            Cause.PENDING_STORE,
            f"{pending:,} {'chunk' if pending == 1 else 'chunks'} of {name} "
            f"{'was' if pending == 1 else 'were'} still being written when the request came",
        )
    if is_windowed(group) and not states[State.HELD_BACK]:
        stored = any(case.resident(group.kv_group, k) for k in range(gone[-1]))
        if after or not stored:
            return _window(case, group, evidence, Confidence.CERTAIN)
    was, it = ("was", "it") if len(gone) == 1 else ("were", "them")
    if after:
        gaps = "chunk " if len(gone) == 1 else "chunks "
        gaps += ", ".join(map(str, gone[:4])) + (", ..." if len(gone) > 4 else "")
        return finding(
            Cause.STORE_GAP,
            f"{count} {was} computed but never stored ({gaps}), so that the "
            f"{evidence['resident_after_gap']:,} stored after chunk {first} cannot be reached",
        )
    held = states[State.HELD_BACK] or group.drafter_used
    return finding(
        Cause.TAIL_HELD_BACK,
        f"{count} at the end of the stored range (from chunk {first} on) {was} never offered to "
        f"the tier, not even when the request that computed {it} finished",
        Confidence.CERTAIN if held else Confidence.LIKELY,
    )


def _window(
    case: Case, group: GroupLayout, evidence: dict[str, Any], confidence: Confidence
) -> Finding:
    """A windowed group whose kept run is shorter than what the reader asks for."""
    chunk = group.tokens_per_chunk
    boundary = case.local + case.target
    needed = required_chunks(group, case.local, boundary) or range(0)
    top = -(-boundary // chunk) if group.pop or group.drafter_used else needed.stop - 1
    kept = 0
    while top - kept >= needed.start and case.resident(group.kv_group, top - kept):
        kept += 1
    wanted = max(len(needed), 0) + (top - needed.stop + 1)
    drafter = ", one of them to pop" if top >= needed.stop else ""
    step = ""
    reason = (
        f"{group_name(case, group.kv_group)} kept {kept} of the {wanted} chunks that a boundary "
        f"of {boundary:,} tokens needs{drafter}"
        f"{', though all other groups have theirs' * evidence.get('other_groups_complete', False)}"
    )
    if kept >= wanted:
        reason = (
            f"a boundary of {boundary:,} tokens needs {wanted} chunks of "
            f"{group_name(case, group.kv_group)}, which are resident, but the search asks for more"
        )
        step = (
            f"Choose a chunk size that divides the window of kv_group {group.kv_group} "
            f"({group.window or group.attention_chunk:,} tokens), or report this record to vLLM: "
            f"its search asks for more of the window than attention needs."
        )
    more = {"window_kept_chunks": kept, "window_needed_chunks": wanted,
            "window_tokens": group.window or group.attention_chunk}  # fmt: skip
    return Finding([Cause.WINDOW_VETO], reason, evidence | more, confidence, group.kv_group,
                   next_step=step)  # fmt: skip


def _pop_reason(case: Case, cause: Cause, used: set[int], annotated: set[int]) -> str:
    by_name = f"{group_name(case, case.vetoing_group)} " if case.vetoing_group is not None else ""
    if cause is Cause.DRAFTER_FALLBACK:
        every = len(used) == len(case.layout.groups) > 1
        which = f"all {len(used)} groups were" if every else _groups(used)
        plural = every or len(used) > 1
        real = f"only {_groups(annotated)}" if annotated else "none is"
        veto = f"; {by_name}brought the boundary down" if by_name else ""
        return (
            f"{which} treated as {'drafter groups' if plural else 'a drafter group'} and lost "
            f"{'their' if plural else 'its'} last chunk, though {real} annotated as one{veto}"
        )
    return (
        f"the drafter pop {f'in {by_name}' if by_name else ''}took one chunk from a query that had "
        f"not asked for one more, which left less than the other groups need"
    )


def _either_or_both(alone: bool, other: Cause) -> str:
    if alone:
        return f"; {other} explains it as well: either change alone would have served more"
    return f"; {other} has its part in it: only both changes together would have served more"


def _groups(kv_groups: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(kv_groups)))
    return f"group {numbers} was" if len(kv_groups) == 1 else f"groups {numbers} were"


def is_windowed(group: GroupLayout) -> bool:
    """Whether the group needs a window of chunks that ends at the boundary."""
    return not group.full_attention and not group.recurrent
