"""What verdicts, causes, exits, incidents and cell states mean, in plain words.

The only place of the web pages that explains terms; everything a reader may not
know has an entry here, so that no number stands without its one-line explanation.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvlens.dashboard.view.cells import CellState
from kvlens.telemetry.semconv import Cause, Exit, IncidentKind, Verdict


class Term(NamedTuple):
    """A term: its label, its explanation and the tone that colours it."""

    label: str
    help: str
    tone: str = "quiet"


VERDICTS: Final[dict[str, Term]] = {
    Verdict.FULL: Term("full", "Everything that could be reused was served.", "good"),
    Verdict.PARTIAL: Term(
        "partial", "Some reusable tokens were served, the rest recomputed.", "warn"
    ),
    Verdict.LOST: Term("lost", "Reusable tokens existed, yet none were served.", "bad"),
    Verdict.LOCAL: Term("local", "The GPU prefix cache already held the prefix.", "good"),
    Verdict.COLD: Term("cold", "This prefix was never computed before on this engine.", "quiet"),
    Verdict.EVICTED: Term("evicted", "The tier held the prefix once and evicted it.", "warn"),
    Verdict.UNSTORED: Term("unstored", "The prefix was computed but never stored.", "warn"),
    Verdict.STALLED: Term("stalled", "The lookup kept being deferred instead of answered.", "bad"),
    Verdict.UNSAFE: Term(
        "unsafe", "Served a boundary at which a recurrent group has no state.", "bad"
    ),
    Verdict.SKIPPED: Term("skipped", "This request does not read the cache.", "quiet"),
}

CAUSES: Final[dict[str, str]] = {
    Cause.DRAFTER_FALLBACK: (
        "No KV group is annotated as holding drafter layers, so the connector treats all of them "
        "as drafter groups and pops the last matched chunk of each. A group that needs only one "
        "chunk is left with none, and one group at zero zeroes the request."
    ),
    Cause.POP_WITHOUT_WIDENING: (
        "A drafter group loses its last matched chunk; the lookup did not query one more to make "
        "up for it, so the boundary fell below what another group can serve."
    ),
    Cause.WINDOW_VETO: (
        "A windowed group does not hold enough consecutive chunks before the boundary, "
        "so it vetoes what all other groups could serve."
    ),
    Cause.CHUNK_GRANULARITY: (
        "The groups' chunk sizes leave no common boundary within the reusable prefix."
    ),
    Cause.STORE_GAP: (
        "A chunk in the middle of the prefix was never stored; all behind it is unreachable."
    ),
    Cause.TAIL_HELD_BACK: (
        "The trailing chunk was held back while decoding and not stored when the request finished."
    ),
    Cause.ALLOCATION_FAILURE: "The offload tier had no room when the chunks were offered.",
    Cause.TRANSFER_FAILED: "A transfer between the GPU cache and the offload tier failed.",
    Cause.CAPACITY: "The tier is smaller than what has to stay until it is asked for again.",
    Cause.POLICY: "The configuration keeps these chunks out of the offload tier.",
    Cause.HASH_SEED: "Block hashes depend on PYTHONHASHSEED; unset, they differ after a restart.",
    Cause.PENDING_STORE: "The lookup found a chunk whose write has not completed.",
    Cause.RETRY_STALL: "All chunks were found, but each retry starts the scan anew.",
    Cause.MISALIGNED_STATE: (
        "The boundary is not where a recurrent group stored its state, so the state loaded "
        "belongs to another position."
    ),
    Cause.UNWRITTEN_SLOT: "A block was stored whose last slot had not been written.",
    Cause.NOT_ATTRIBUTABLE: "The record does not prove any single cause.",
}

EXITS: Final[dict[str, str]] = {
    Exit.SERVED: "Tokens were answered and admitted.",
    Exit.PARTIAL_TAIL: "Served up to a partial last block.",
    Exit.COVERED: "Less than a chunk was left to ask for.",
    Exit.MISS: "The first group asked had nothing.",
    Exit.VETOED: "One group had too little for what the others could serve.",
    Exit.POPPED_OUT: "The pop of a drafter group's last chunk left nothing.",
    Exit.BELOW_CHUNK: "What was left after the queries is less than a chunk.",
    Exit.DEFERRED_BACKEND: "The tier could not say yet.",
    Exit.DEFERRED_LOADING: "The same chunks were being loaded for another request.",
    Exit.DEFERRED_TRANSFER: "This request still had transfers in flight.",
    Exit.SKIPPED: "This request does not read the cache.",
    Exit.NOT_ADMITTED: "Answered, but the scheduler could not admit the request.",
    Exit.OTHER_CONNECTOR: "Another connector served the prompt.",
}

INCIDENTS: Final[dict[str, Term]] = {
    IncidentKind.ZERO_HIT: Term(
        "Every offload hit is lost", "Requests that should be served get 0 tokens, in a row."
    ),
    IncidentKind.LOST_HITS: Term(
        "Offload hits are being lost", "More than a tenth of the expected tokens is recomputed."
    ),
    IncidentKind.STORE_GAPS: Term("Stored prefixes have gaps", "Chunks are missing mid-prefix."),
    IncidentKind.CAPACITY_THRASH: Term(
        "Evicted before reuse", "The tier evicts prefixes that are asked for again."
    ),
    IncidentKind.DEFERRAL_STALL: Term(
        "Lookups are stalled", "Requests wait for an answer of the offload tier."
    ),
    IncidentKind.SLOW_RELOAD: Term("Reloads are slow", "Twice as slow as this engine's baseline."),
    IncidentKind.STORE_FAILURES: Term("Stores are failing", "Loads go on, some stores fail."),
    IncidentKind.LOAD_FAILURES: Term("Loads are failing", "Hits cannot be loaded."),
    IncidentKind.UNSAFE_BOUNDARY: Term(
        "Unsafe boundary served", "A recurrent state of another position was loaded."
    ),
    IncidentKind.TELEMETRY_LOST: Term("Telemetry is being lost", "Counts are a lower bound."),
    IncidentKind.VERSION_REGRESSION: Term(
        "A version serves less", "Served share fell against the last good version or config."
    ),
    IncidentKind.LOOKUP_FALLBACK: Term(
        "Corrections are off", "An invariant failed, so that vLLM's own lookup is used."
    ),
    IncidentKind.NOTHING_STORED: Term(
        "Nothing is stored", "The tier is asked, and has held nothing since the start."
    ),
    IncidentKind.LOW_HITS: Term(
        "Hardly any offload hits", "The tier gives back little of what is asked for and stored."
    ),
    IncidentKind.LOCAL_HITS_LOST: Term(
        "GPU cache hits are lost", "The GPU's own prefix cache finds nothing, though it is there."
    ),
}

CELLS: Final[dict[CellState, Term]] = {
    CellState.LOCAL: Term("local", "Already in the GPU prefix cache; not asked of the tier."),
    CellState.SERVED: Term("served", "Loaded from the offload tier."),
    CellState.POPPED: Term("popped", "Hit, then given up: a drafter's last chunk is volatile."),
    CellState.HIT: Term("hit, not served", "Found, but the final boundary does not use it."),
    CellState.RESIDENT: Term("stored, not asked", "In the tier, but no query reached it."),
    CellState.MISSING: Term("missing", "Asked for, not in the tier."),
    CellState.UNASKED: Term("not asked", "Beyond the query or outside the window; not stored."),
    CellState.UNKNOWN: Term("unknown", "The record lists no residency this far."),
}

ENGINES: Final[dict[str, Term]] = {
    "serving": Term("serving", "It reported within the last two minutes.", "good"),
    "losing": Term("losing hits", "An incident of this engine is open.", "bad"),
    "idle": Term("idle", "It has not reported for two minutes: no requests, or no connection."),
    "gone": Term("gone", "It stopped, a later start replaced it, or nothing was heard of it."),
}

TARGETS: Final[dict[str, Term]] = {
    "up": Term("up", "It answers.", "good"),
    "down": Term("down", "The last scrape failed.", "bad"),
    "pending": Term("pending", "It has not been read yet."),
    "not_vllm": Term("not vLLM", "It answers, but with no engine's numbers.", "warn"),
}

HELP: Final[dict[str, str]] = {
    "prompt": "Tokens of the prompt.",
    "local": "Tokens that the GPU prefix cache already held.",
    "served": "Tokens loaded from the offload tier instead of being computed again.",
    "servable": "Tokens that were in the tier and reusable when it was asked.",
    "expected": "Tokens the tier should have served, had all computed chunks been stored and kept.",
    "lost": "Tokens recomputed although the tier should have served them.",
    "lost_at_lookup": "In the tier, but the lookup did not serve them.",
    "lost_at_store": "Should have been in the tier, but were not stored or kept.",
    "recomputed": "Reusable tokens that were computed again.",
    "new": "Tokens never computed before; they have to be computed.",
    "width": "Chunks asked of this group.",
    "raw_hits": "Chunks found, before the pop.",
    "popped": "Volatile trailing chunks given up after the query.",
    "boundary": "Tokens from the prompt's start confirmed after this query.",
    "pass": "Round of the search; a tightened boundary sends earlier groups around again.",
    "latency": "From allocation until the scheduler saw the load finished.",
    "transfer": "Time the device spent on the copy.",
    "attempt": "How many times the scheduler had asked for this request by then.",
    "offered": "Chunks offered to the tier.",
    "stored": "Chunks the tier accepted.",
    "held_back": "Chunks not offered.",
    "refused": "Chunks the tier had no room for.",
    "already": "Chunks the tier already held.",
    "excluded": "Chunks that the configuration keeps out of the tier.",
    "evictions": "Chunks evicted to make room for this store.",
    "confidence": "How sure the cause is: certain, likely or guess.",
    "deferral": "Time from the first deferred lookup until an answer.",
    "lookup": "Lookup mode: stock only observes, corrected and exact repair the search.",
    "local_mark": "Up to here the GPU prefix cache had the prompt.",
    "served_mark": "Up to here the lookup answered.",
    "servable_mark": "Up to here it could have answered with what was in the tier.",
    "expected_mark": "Up to here it could have answered, had all chunks been stored and kept.",
    "requests": "Finished requests.",
    "evicted_tokens": "Tokens computed again because the tier had evicted their chunks.",
    "gpu_time": "Device time to compute lost and evicted tokens, at the engine's own prefill rate.",
    "gpu_devices": "GPU time lost per second of this range: devices that do nothing else.",
    "incident_duration": "Finish of the first affected request to the newest one.",
    "groups": "KV-cache groups that brought the requests to zero.",
    "incarnation": "One life of an engine, from start to stop.",
}


def verdict(name: str) -> Term:
    """The word for a verdict; an unknown one (a newer engine's) is shown as it is."""
    return VERDICTS.get(name, Term(name.replace("_", " "), "Not known to this version."))


def cause(name: str) -> Term:
    """The word for a cause, as for :func:`verdict`."""
    return Term(name.replace("_", " "), CAUSES.get(name, "Not known to this version."))


def incident(kind: str) -> Term:
    """The word for an incident kind, as for :func:`verdict`."""
    return INCIDENTS.get(kind, Term(kind.replace("_", " "), "Not known to this version."))
