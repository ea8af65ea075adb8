"""What is known so far about a request that has not been emitted yet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kvlens.telemetry import facts
from kvlens.telemetry.records import Load, Lookup, Store
from kvlens.telemetry.verdict.case import Case

MAX_LOOKUPS = 256
"""Lookups remembered of one request: the first eighth and the newest. Identical ones in a row are
one; a backend that answers differently at each step could fill the memory otherwise."""
MAX_ID = 512
"""Characters of a request's id in its record; clients choose them, and longer ones are cut."""
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^\d+_(?=(chat)?cmpl-)")


def external_id(request_id: str) -> str:
    """The client's request id, as vLLM's own ``llm_request`` span has it.

    vLLM appends eight random hex digits to it, and with ``n`` over 1 it prepends
    ``0_``, ``1_``, ... to that; an id that only looks like it is left alone.
    """
    return _CHILD.sub("", _SUFFIX.sub("", request_id))


def bounded_id(request_id: str) -> str:
    """An id of at most :data:`MAX_ID` characters; of a longer one start and end are left."""
    if len(request_id) <= MAX_ID:
        return request_id
    half = MAX_ID // 2
    return f"{request_id[: half - 1]}~{request_id[-half:]}"


@dataclass
class Answer:
    """An answered lookup, with what was servable and expected at that moment.

    Token counts are beyond ``local``. Residency moves on, so that they are
    computed when the lookup happens, not when the request ends.
    """

    fact: facts.LookedUp
    lookup: Lookup
    servable: int = 0
    expected: int = 0
    seen_before: bool = False
    """Whether any chunk of the request was known."""
    counted: bool = False
    """Whether the lookup's exit has been counted."""


@dataclass
class OpenRequest:
    """A request between its arrival and the emission of its record."""

    added: facts.Added
    trace_id: str = ""
    parent_span_id: str = ""
    lookups: list[Lookup] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    answer: Answer | None = None
    """The last answered lookup."""
    asked: facts.LookedUp | None = None
    """The last lookup, answered or deferred."""
    signature: tuple[Any, ...] | None = None
    """Of the last lookup, if it was deferred: identical ones are coalesced."""
    not_taken: tuple[Any, ...] | None = None
    """Of the answer before, if it was not admitted: identical ones are coalesced as well."""
    attempts: int = 0
    deferrals: int = 0
    """Lookups that were deferred."""
    deferred_exit: str | None = None
    """Exit of the last of them."""
    waited_for: tuple[int, int] | None = None
    """``(kv_group, chunk)`` that was being written when its deferral was last reported."""
    truncated: bool = False
    """There were more lookups than are remembered."""
    admitted: bool = False
    served: int = 0
    admission: Load | None = None
    """The load that it was admitted with."""
    failed_tokens: int = 0
    """What it was admitted with before, until that load failed."""
    other_connector: bool = False
    case: Case | None = None
    """What the judgement was made from; what it says of chunks' states moves on."""
    judgement: Any = None
    unwritten: tuple[int, int] | None = None
    """``(kv_group, chunk)`` that was stored after the end with a slot never written."""
    deferred_since_ns: int | None = None
    deferral_ns: int = 0
    next_deferral_ns: int = 0
    finished: facts.Finished | None = None
    emit_at_ns: int = 0
    pending_jobs: int = 0
    preemptions: int = 0
    local_tokens: int | None = None
    """Tokens that the GPU cache covered, by vLLM's own account."""
    other_tokens: int = 0
    """Tokens that another connector loaded for it."""
    started: int | None = None
    """Tokens behind which the model runner began to compute."""
    started_ns: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    ghost_chunks: int = 0
    ghost_distance: int = 0
    reuse_distance: int | None = None

    @property
    def request_id(self) -> str:
        """vLLM's internal id."""
        return self.added.request_id

    def load_failed(self) -> None:
        """What it was admitted with was not loaded: it is to be admitted anew."""
        self.failed_tokens = max(self.failed_tokens, self.served)
        self.served, self.admitted, self.admission = 0, False, None
        self.case = self.judgement = None
        self.tiers = {}

    def note(self, lookup: Lookup) -> None:
        """Remember a lookup, within the bound."""
        self.lookups.append(lookup)
        if len(self.lookups) > MAX_LOOKUPS:
            del self.lookups[MAX_LOOKUPS // 8]
            self.truncated = True
