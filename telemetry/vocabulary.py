"""The closed sets of values that labels, attributes and records take.

:mod:`semconv` hands them on; nobody else imports this module.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Word(str, Enum):
    """A string enum whose members print as their value (StrEnum needs 3.11)."""

    def __str__(self) -> str:
        return str(self.value)


class GroupKind(Word):
    """Kind of a KV-cache group."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    MAMBA = "mamba"


class Exit(Word):
    """How one lookup ended; exactly one per lookup."""

    SERVED = "served"
    PARTIAL_TAIL = "partial_tail"
    COVERED = "covered"
    MISS = "miss"
    VETOED = "vetoed"
    POPPED_OUT = "popped_out"
    BELOW_CHUNK = "below_chunk"
    DEFERRED_BACKEND = "deferred_backend"
    DEFERRED_LOADING = "deferred_loading"
    DEFERRED_TRANSFER = "deferred_transfer"
    SKIPPED = "skipped"
    NOT_ADMITTED = "not_admitted"
    OTHER_CONNECTOR = "other_connector"


DEFERRED_EXITS: Final = frozenset(
    {Exit.DEFERRED_BACKEND, Exit.DEFERRED_LOADING, Exit.DEFERRED_TRANSFER}
)


class Verdict(Word):
    """What became of a request's reusable tokens; exactly one per request."""

    FULL = "full"
    PARTIAL = "partial"
    LOST = "lost"
    LOCAL = "local"
    COLD = "cold"
    EVICTED = "evicted"
    UNSTORED = "unstored"
    STALLED = "stalled"
    UNSAFE = "unsafe"
    SKIPPED = "skipped"


QUIET_VERDICTS: Final = frozenset({Verdict.FULL, Verdict.LOCAL, Verdict.COLD})
"""Verdicts that sampling may drop; all others are always kept."""


class Cause(Word):
    """The smallest change that would have changed the result."""

    DRAFTER_FALLBACK = "drafter_fallback"
    POP_WITHOUT_WIDENING = "pop_without_widening"
    WINDOW_VETO = "window_veto"
    CHUNK_GRANULARITY = "chunk_granularity"
    STORE_GAP = "store_gap"
    TAIL_HELD_BACK = "tail_held_back"
    ALLOCATION_FAILURE = "allocation_failure"
    TRANSFER_FAILED = "transfer_failed"
    CAPACITY = "capacity"
    POLICY = "policy"
    HASH_SEED = "hash_seed"
    PENDING_STORE = "pending_store"
    RETRY_STALL = "retry_stall"
    MISALIGNED_STATE = "misaligned_state"
    UNWRITTEN_SLOT = "unwritten_slot"
    NOT_ATTRIBUTABLE = "not_attributable"


class Confidence(Word):
    """How sure a verdict is of its cause."""

    CERTAIN = "certain"
    LIKELY = "likely"
    GUESS = "guess"


class Depth(Word):
    """How far into an engine its connector sees (design, section 12)."""

    INTERFACE = "interface"
    """The public connector interface only: no widths, pops, vetoes or causes."""
    GROUPS = "groups"
    """vLLM's own search as well, group by group."""


class Fallback(Word):
    """Why vLLM's own lookup is used although another one was configured."""

    OPERATOR = "operator"
    INVARIANT = "invariant"


class Source(Word):
    """Where the KV data of a prompt's tokens came from."""

    LOCAL = "local"
    OFFLOAD = "offload"
    OTHER_CONNECTOR = "other_connector"
    COMPUTED = "computed"


class Tier(Word):
    """Which offload tier tokens were loaded from (vLLM's ``CacheHitSource``)."""

    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


class Identity(Word):
    """What has to add up; see ``telemetry/state/identities.py``."""

    REQUEST_TOKENS = "request_tokens"
    HITS_WITHIN_QUERIES = "hits_within_queries"
    BOUNDARY_WITHIN_HITS = "boundary_within_hits"
    STORED_CHUNKS = "stored_chunks"


class IncidentKind(Word):
    """What a detector can report (design, section 7)."""

    ZERO_HIT = "zero_hit"
    LOST_HITS = "lost_hits"
    STORE_GAPS = "store_gaps"
    CAPACITY_THRASH = "capacity_thrash"
    DEFERRAL_STALL = "deferral_stall"
    SLOW_RELOAD = "slow_reload"
    STORE_FAILURES = "store_failures"
    LOAD_FAILURES = "load_failures"
    UNSAFE_BOUNDARY = "unsafe_boundary"
    TELEMETRY_LOST = "telemetry_lost"
    VERSION_REGRESSION = "version_regression"
    LOOKUP_FALLBACK = "lookup_fallback"
    NOTHING_STORED = "nothing_stored"
    LOW_HITS = "low_hits"
    LOCAL_HITS_LOST = "local_hits_lost"


class Severity(Word):
    """Severity of an incident."""

    CRITICAL = "critical"
    WARNING = "warning"
