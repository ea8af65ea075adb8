"""What became of a request's reusable tokens, and why: a pure function of a case.

Precedence: requests that did not read, unsafe states, failed loads, stalls, then
the numbers. What was resident and not served is the lookup's fault, what was
computed and not resident the store's; the larger loss names the cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlens.telemetry.semconv import Cause, Confidence, Exit, Verdict
from kvlens.telemetry.state.residency import State
from kvlens.telemetry.verdict.advice import next_step
from kvlens.telemetry.verdict.case import Case, Judgement, UnsafeState, expected_boundary
from kvlens.telemetry.verdict.causes import Finding, group_name, lookup_finding, store_finding
from kvlens.telemetry.verdict.oracle import limit

__all__ = ["Case", "Judgement", "UnsafeState", "expected_boundary", "judge"]

STALL_SECONDS = 10.0
"""A request whose lookup waited this long is stalled, whatever came of it."""
UNRESOLVED_SECONDS = 1.0
"""The same for one that ended while it waited; shorter ones were cancelled."""


def judge(case: Case) -> Judgement:
    """Judge one request."""
    said = (
        did_not_read(case)
        or _unsafe(case)
        or _load_failed(case)
        or _stalled(case)
        or _by_numbers(case)
    )
    return judge_store(case, said)


def judge_store(case: Case, said: Judgement) -> Judgement:
    """``said`` of a request, unless it stored a chunk that is not safe to reuse.

    That is known only once the request has ended; what it was served, long before.
    """
    if case.unwritten is not None and said.verdict is not Verdict.UNSAFE:
        said = _unwritten(case, case.unwritten, said)
    if said.cause is not None and not said.next_step:
        said = replace(said, next_step=next_step(said.cause, _facts(case, said)))
    return said


def did_not_read(case: Case) -> Judgement | None:
    """Requests that asked nothing of the tier, or whose answer was never used."""
    if case.skip_reading or case.exit == Exit.SKIPPED:
        why = "It did not read the prefix cache (skip_reading_prefix_cache, as for prompt_logprobs)"
    elif case.other_connector or case.exit == Exit.OTHER_CONNECTOR:
        why = "Another connector served this prompt"
    elif case.failed:
        return None
    elif not case.served and case.exit in (Exit.SERVED, Exit.PARTIAL_TAIL, Exit.NOT_ADMITTED):
        why = "It ended before the scheduler admitted it, so that the tier's answer was not used"
    elif case.unresolved and case.deferral_seconds < UNRESOLVED_SECONDS:
        why = f"It ended after waiting {case.deferral_seconds:.2f} s for the tier"
    else:
        return None
    return Judgement(Verdict.SKIPPED, f"{why}: nothing was lost.")


def _unsafe(case: Case) -> Judgement | None:
    found = case.unsafe or _derived_unsafe(case)
    if found is None:
        return None
    boundary = case.local + case.served
    past = found.state_tokens - min(boundary, case.num_tokens - 1)
    evidence = {
        "boundary": boundary,
        "state_chunk": found.chunk,
        "state_tokens": found.state_tokens,
        "tokens_past_boundary": past,
        "num_tokens": case.num_tokens,
        "kv_group": found.kv_group,
    }
    late = found.state_tokens - boundary
    last = f"{late:,} too many" if late > 0 else "the one that is yet to be computed among them"
    summary = (
        f"UNSAFE: {case.served:,} tokens were served up to a boundary of {boundary:,}, but "
        f"{group_name(case, found.kv_group)} loaded the state after {found.state_tokens:,} "
        f"tokens ({last}): the output of this request may be wrong."
    )
    return _judgement(
        case, Verdict.UNSAFE, summary, Cause.MISALIGNED_STATE, evidence=evidence,
        vetoing_group=found.kv_group,
    )  # fmt: skip


def _derived_unsafe(case: Case) -> UnsafeState | None:
    """vLLM loads, of a recurrent group, the chunk that holds the boundary's last token."""
    if not case.served or case.exit == Exit.PARTIAL_TAIL:
        return None
    boundary = case.local + case.served
    for group in (g for g in case.layout.groups if g.recurrent):
        chunk = -(-boundary // group.tokens_per_chunk) - 1
        state_tokens = (chunk + 1) * group.tokens_per_chunk
        if state_tokens > min(boundary, case.num_tokens - 1):
            return UnsafeState(group.kv_group, chunk, state_tokens)
    return None


def _load_failed(case: Case) -> Judgement | None:
    """Admitted with tokens that then could not be loaded."""
    if not case.failed or case.served:
        return None
    after = "the request ended with it" if case.unstarted else "they were computed instead"
    summary = (
        f"None of {case.target:,} reusable tokens were served: the load of {case.failed:,} failed, "
        f"and {after}."
    )
    evidence = {"failed_tokens": case.failed, "servable_tokens": case.servable}
    return _judgement(case, Verdict.LOST, summary, Cause.TRANSFER_FAILED, evidence=evidence)


def _stalled(case: Case) -> Judgement | None:
    if case.deferral_seconds < (UNRESOLVED_SECONDS if case.unresolved else STALL_SECONDS):
        return None
    pending = list(case.chunks_in(State.PENDING))
    writing = pending[0] if pending else case.waited_for
    evidence: dict[str, Any] = {
        "deferral_seconds": round(case.deferral_seconds, 3),
        "deferred_lookups": case.deferrals,
        "deferred_exit": case.deferred_exit,
        "unresolved": case.unresolved,
        "pending_chunks": len(pending),
        "resident_chunks": sum(1 for _ in case.chunks_in(State.RESIDENT)),
        "servable_tokens": case.servable,
    }
    confidence = Confidence.CERTAIN
    if writing is not None:
        cause, (kv_group, chunk) = Cause.PENDING_STORE, writing
        evidence |= {"first_pending_chunk": chunk, "kv_group": kv_group}
        ended = "has not completed" if pending else "completed only then"
        why = f"chunk {chunk} of {group_name(case, kv_group)} was found, but its write {ended}"
    elif case.deferred_exit == Exit.DEFERRED_TRANSFER:
        cause, confidence = Cause.PENDING_STORE, Confidence.LIKELY
        why = "transfers of the request itself are still in flight"
    elif case.deferred_exit == Exit.DEFERRED_LOADING:
        cause, confidence = Cause.RETRY_STALL, Confidence.LIKELY
        why = "its chunks are being loaded for another request, which does not finish"
    else:
        cause = Cause.RETRY_STALL
        why = (
            f"the tier keeps answering 'later', though {evidence['resident_chunks']:,} of its "
            f"chunks are stored and none is being written"
        )
    # Also said of a request that still waits: its deferral is reported before it ends.
    waited = "without an answer" if case.unresolved else f"then {case.served:,} tokens were served"
    summary = (
        f"Its lookup was deferred for {case.deferral_seconds:.1f} s "
        f"({case.deferrals:,} lookups), {waited}: {why}."
    )
    return _judgement(
        case, Verdict.STALLED, summary, cause, evidence=evidence, confidence=confidence
    )


def _by_numbers(case: Case) -> Judgement:
    chunks = [group.tokens_per_chunk for group in case.layout.groups] or [1]
    # vLLM loads nothing below a chunk of every group: a remainder is no finding.
    if case.target - case.served < (min(chunks) if case.served else max(chunks)):
        return _nothing_lost(case, max(chunks))
    at_lookup, at_store = _losses(case)
    by_lookup = at_lookup >= at_store
    finding = lookup_finding(case) if by_lookup else store_finding(case)
    if not by_lookup and finding.is_tail and at_lookup == 0:
        verdict = Verdict.UNSTORED
    else:
        verdict = Verdict.PARTIAL if case.served else Verdict.LOST
    # Of both losses the larger names the cause; the other is told too, if it is a chunk or more.
    other: Finding | None = None
    if min(at_lookup, at_store) >= min(chunks):
        other = store_finding(case) if by_lookup else lookup_finding(case)
    served = f"{case.served:,} of {case.target:,}" if case.served else f"None of {case.target:,}"
    also = ""
    if other is not None:
        tokens, where = min((at_lookup, "were there and not served"), (at_store, "were not there"))
        also = f"; {tokens:,} more {where}: {other.reason}"
    return _judgement(
        case, verdict, f"{served} reusable tokens were served: {finding.reason}{also}.",
        *finding.causes, *(other.causes if other else ()), evidence=finding.evidence,
        confidence=finding.confidence, vetoing_group=finding.vetoing_group,
        next_step=finding.next_step,
    )  # fmt: skip


def _nothing_lost(case: Case, largest: int) -> Judgement:
    """Everything that could be served was; if that is little, say why it is."""
    reached = case.local + max(case.target, case.served)
    evicted = case.boundary_if(State.EVICTED) - reached
    if evicted >= largest:
        return _evicted(case, evicted)
    if case.served:
        return _remainder(case, Verdict.FULL, f"The tier served {case.served:,} reusable tokens")
    excluded = case.boundary_if(State.EXCLUDED) - reached
    if excluded >= largest:
        summary = (
            f"{excluded:,} tokens were computed before, but policy keeps their chunks out of the "
            f"tier."
        )
        evidence = {
            "excluded_tokens": excluded,
            "offload_prompt_only": case.offload_prompt_only,
            "store_threshold": case.store_threshold,
            "retention_interval": case.retention_interval,
        }
        return _judgement(case, Verdict.UNSTORED, summary, Cause.POLICY, evidence=evidence)
    if not case.residency_known and case.seen_before and not case.local:
        summary = (
            "The prompt was seen before and nothing of it was found, but facts were lost since: "
            "whether it was evicted or never stored is not known."
        )
        return _judgement(
            case, Verdict.UNSTORED, summary, Cause.NOT_ATTRIBUTABLE, confidence=Confidence.GUESS
        )
    if case.local:
        covered = f"The GPU cache covered the {case.local:,} tokens that could be reused"
        return _remainder(case, Verdict.LOCAL, covered)
    return _cold(case, largest)


def _evicted(case: Case, tokens: int) -> Judgement:
    gone = sum(1 for _ in case.chunks_in(State.EVICTED))
    evidence = {
        "evicted_tokens": tokens,
        "evicted_chunks": gone,
        "slots_needed": case.slots,
        "capacity_chunks": case.capacity_chunks,
    }
    pool = "the tier" if case.capacity_chunks is None else f"{case.capacity_chunks:,} slots"
    kept = f"{case.served:,} tokens were served, but " if case.served else ""
    summary = (
        f"{kept}{tokens:,} more reusable tokens had been stored and were evicted before they came "
        f"back: the prompt needs {case.slots:,} slots of {pool}, and {gone:,} of its chunks had to "
        f"make room for others."
    )
    summary = summary[0].upper() + summary[1:]
    said = _judgement(case, Verdict.EVICTED, summary, Cause.CAPACITY, evidence=evidence)
    return replace(said, evicted=tokens)


def _remainder(case: Case, verdict: Verdict, summary: str) -> Judgement:
    """Nothing is wrong, though less than a chunk may have been left."""
    rest = case.target - case.served
    if rest <= 0:
        return _judgement(case, verdict, f"{summary}.")
    summary += f"; a remainder of {rest:,} more, less than a chunk, was left."
    evidence = {"remainder_tokens": rest, "largest_chunk_tokens": case.layout.largest_chunk}
    return _judgement(
        case, verdict, summary, Cause.CHUNK_GRANULARITY, evidence=evidence,
        next_step="Nothing to do: vLLM loads whole chunks only.",
    )  # fmt: skip


def _cold(case: Case, largest: int) -> Judgement:
    probes = sum(query.width for query in case.lookups if query.pass_number)
    if case.persistent_tier and not case.hash_seed_fixed and probes and not case.seen_before:
        summary = (
            f"None of {probes:,} chunks asked for was found in a tier that outlives the engine, "
            f"and PYTHONHASHSEED is not set: each start hashes the same prompt differently."
        )
        return _judgement(
            case, Verdict.COLD, summary, Cause.HASH_SEED, evidence={"probes": probes, "hits": 0},
            confidence=Confidence.LIKELY,
        )  # fmt: skip
    room = limit(case.layout, case.local, case.num_tokens)
    finest = min((group.tokens_per_chunk for group in case.layout.groups), default=largest)
    if finest <= room < largest:
        summary = (
            f"No prompt under {largest:,} tokens can ever be served: the coarsest group has chunks "
            f"of that size, and this prompt has {case.prompt_tokens:,} tokens."
        )
        evidence = {"largest_chunk_tokens": largest, "prompt_tokens": case.prompt_tokens}
        return _judgement(case, Verdict.COLD, summary, Cause.CHUNK_GRANULARITY, evidence=evidence)
    if case.exit == Exit.POPPED_OUT:
        return _judgement(
            case, Verdict.COLD, f"All that {group_name(case, case.vetoing_group)} holds of this "
            f"prompt is its volatile last chunk, which may not be served.",
            vetoing_group=case.vetoing_group,
        )  # fmt: skip
    known = "No complete chunks of all groups" if case.seen_before else "Nothing of this prompt"
    return _remainder(case, Verdict.COLD, f"{known} had been computed before")


def _unwritten(case: Case, where: tuple[int, int], said: Judgement) -> Judgement:
    """A store that put a junk slot under a valid hash outweighs how the request was served."""
    kv_group, chunk = where
    size = case.layout.by_group()[kv_group].tokens_per_chunk
    summary = (
        f"UNSAFE: the request stored chunk {chunk} of {group_name(case, kv_group)}, whose last "
        f"slot (token {(chunk + 1) * size:,}) was never written; whoever reuses it reads junk."
    )
    evidence = {"kv_group": kv_group, "chunk": chunk, "unwritten_token": (chunk + 1) * size,
                "verdict_otherwise": str(said.verdict)}  # fmt: skip
    unsafe = _judgement(case, Verdict.UNSAFE, summary, Cause.UNWRITTEN_SLOT, evidence=evidence)
    return replace(
        unsafe, servable=said.servable, expected=said.expected,
        lost_at_lookup=said.lost_at_lookup, lost_at_store=said.lost_at_store,
    )  # fmt: skip


def _losses(case: Case) -> tuple[int, int]:
    at_lookup = max(0, case.servable - case.served)
    return at_lookup, max(0, case.expected - max(case.servable, case.served))


def _judgement(
    case: Case,
    verdict: Verdict,
    summary: str,
    *causes: Cause,
    evidence: dict[str, Any] | None = None,
    confidence: Confidence = Confidence.CERTAIN,
    vetoing_group: int | None = None,
    next_step: str = "",
) -> Judgement:
    doubtful = verdict is not Verdict.UNSAFE and not case.all_known
    if causes and doubtful and confidence is Confidence.CERTAIN:
        confidence = Confidence.LIKELY  # servable is a lower bound then
    at_lookup, at_store = _losses(case)
    unique = list(dict.fromkeys(causes))
    return Judgement(
        verdict, summary, unique[0] if unique else None, unique, confidence, vetoing_group,
        evidence or {}, next_step, case.servable, case.expected, at_lookup, at_store,
    )  # fmt: skip


def _facts(case: Case, said: Judgement) -> dict[str, Any]:
    return {
        "kv_group": said.vetoing_group,
        "largest_chunk": case.layout.largest_chunk,
        "capacity": "?" if case.capacity_chunks is None else f"{case.capacity_chunks:,}",
        "slots": case.slots,
        "offload_prompt_only": str(case.offload_prompt_only).lower(),
        "store_threshold": case.store_threshold,
        "retention_interval": case.retention_interval,
        **said.evidence,
    }
