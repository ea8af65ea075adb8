"""Facts: what the scheduler thread appends, and nothing more.

A fact is a plain tuple ``(kind, time_ns, ...)``: building one costs a fraction
of a microsecond, a named tuple several times that. The drain thread turns it
into the named form below with :func:`parse`. Times are ``time.monotonic_ns()``.

Lists and sets inside a fact are references to vLLM's own objects, valid
because vLLM never changes them after the call (or only appends to them, and
then the length at the time of the fact is kept beside the reference).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

Keys = Collection[bytes]
"""Offload keys: block hash followed by four bytes of group index, big endian."""
KeyLists = Sequence[tuple[Sequence[bytes], int]]
"""Per group, in config order: the request's key list and its length then."""
Query = tuple[bytes, int, "int | None", "int | None"]
"""One group query: the first key asked for, how many, hits (None = deferred), window or None.

Not the list of keys: vLLM slices it for the query alone, and to hold on to it would cost the
next lookup fresh memory. The keys follow the local prefix in the request's own list.
"""

ADDED: Final = 0
LOOKUP: Final = 1
ADMITTED: Final = 2
OFFERED: Final = 3
STORE_JOB: Final = 4
STORED: Final = 5
LOADED: Final = 6
TRANSFERRED: Final = 7
FINISHED: Final = 8
PREEMPTED: Final = 9
RESET: Final = 10
ERROR: Final = 11
LOST: Final = 12
FALLBACK: Final = 13
STARTED: Final = 14
STEP: Final = 15
TIERS: Final = 16
FAILED: Final = 17
RECEIVED: Final = 18
LOAD_FAILED: Final = 19


class Added(NamedTuple):
    """A request reached the scheduler."""

    time_ns: int
    request_id: str
    arrival_time: float
    prompt_tokens: int
    trace_headers: Any
    """``Mapping[str, str] | None``: W3C headers, if vLLM hands them on."""
    skip_reading: bool
    max_offload_tokens: int | None
    max_load_tokens: int | None = None


class LookedUp(NamedTuple):
    """One call of ``get_num_new_matched_tokens``."""

    time_ns: int
    request_id: str
    end_ns: int
    local_tokens: int
    num_tokens: int
    result: int | None
    queries: Sequence[Query]
    keys: KeyLists
    in_transfer: bool
    """The request still had transfers in flight, so nothing was looked up."""
    partial_tail: int | None
    """Boundary chosen past the last complete chunk, if any."""
    max_new_tokens: int | None
    """Cap on loadable tokens of this lookup, if any."""


class Admitted(NamedTuple):
    """``update_state_after_alloc``: the scheduler took the answer."""

    time_ns: int
    request_id: str
    external_tokens: int
    job_id: int | None
    load_keys: Keys
    synchronous: bool = False
    """The load is part of the step that needs it, and its end is seen after that step."""
    local_tokens: int | None = None
    """Tokens that the GPU cache covers, by vLLM's own account; None if it gives none."""
    other_tokens: int = 0
    """Tokens that another connector loads for it."""


class Offered(NamedTuple):
    """``manager.prepare_store``: keys offered; None = refused, no room."""

    time_ns: int
    request_id: str
    offered: Keys
    accepted: Keys | None
    evicted: Keys


class StoreJob(NamedTuple):
    """A store job left the scheduler."""

    time_ns: int
    request_id: str
    job_id: int
    keys: Keys


class Stored(NamedTuple):
    """``manager.complete_store``."""

    time_ns: int
    keys: Keys
    success: bool


class Loaded(NamedTuple):
    """``manager.complete_load``: the scheduler saw a load finished."""

    time_ns: int
    keys: Keys


class Transferred(NamedTuple):
    """A worker's own measurement of one job."""

    time_ns: int
    job_id: int
    bytes: int
    seconds: float


class Finished(NamedTuple):
    """``request_finished``: before the blocks are freed."""

    time_ns: int
    request_id: str
    reason: str
    num_tokens: int
    computed_tokens: int
    """Tokens whose KV is final: never counts the last sampled one."""
    keys: KeyLists


class Preempted(NamedTuple):
    """Requests that lost their blocks."""

    time_ns: int
    request_ids: Collection[str]


class Reset(NamedTuple):
    """``reset_cache``: the offload tier is empty from here on."""

    time_ns: int


class ObserverError(NamedTuple):
    """An error of ours that was contained on the scheduler thread."""

    time_ns: int
    where: str
    text: str


class Lost(NamedTuple):
    """Facts were dropped here because the queue was full."""

    time_ns: int
    dropped: int
    state_lost: bool
    """One of them changed residency, which is unknown from here on."""


class FellBack(NamedTuple):
    """The engine went over to vLLM's own lookup, or back to the configured one."""

    time_ns: int
    reason: str
    """A ``semconv.Fallback``."""
    active: bool
    """Whether vLLM's own lookup is used for this reason from here on."""
    text: str


class Started(NamedTuple):
    """Requests were given to the model runner for the first time."""

    time_ns: int
    requests: Sequence[tuple[str, int]]
    """``(request id, tokens whose KV data was there)``: computing starts behind them."""


class Step(NamedTuple):
    """One step of the engine that computed prompt tokens has ended."""

    time_ns: int
    seconds: float
    """From when it could start, which is when it was scheduled or the step before ended."""
    tokens: int
    """Tokens computed, without the one per request that a decoding step has."""


class Tiers(NamedTuple):
    """vLLM's own account of the tiers that an admitted request loads from."""

    time_ns: int
    request_id: str
    tokens: Any
    """``Mapping[str, int]``: tokens by ``CacheHitSource``."""


class Failed(NamedTuple):
    """A worker could not transfer what these jobs were to move; told before they complete."""

    time_ns: int
    job_ids: Collection[int]


class Received(NamedTuple):
    """Workers reported that everything these requests load has arrived (``finished_recving``)."""

    time_ns: int
    request_ids: Collection[str]


class LoadFailed(NamedTuple):
    """Blocks that a request was to load are invalid (``invalid_block_ids``)."""

    time_ns: int
    request_id: str


Fact = (
    Added | LookedUp | Admitted | Offered | StoreJob | Stored | Loaded | Transferred | Finished
    | Preempted | Reset | ObserverError | Lost | FellBack | Started | Step | Tiers
    | Failed | Received | LoadFailed
)  # fmt: skip

_TYPES: Final[tuple[Any, ...]] = (
    Added, LookedUp, Admitted, Offered, StoreJob, Stored, Loaded, Transferred, Finished,
    Preempted, Reset, ObserverError, Lost, FellBack, Started, Step, Tiers,
    Failed, Received, LoadFailed,
)  # fmt: skip

STATE_KINDS: Final = frozenset({OFFERED, STORE_JOB, STORED, RESET})
"""Facts that change residency: losing one makes residency unknown."""


def parse(fact: tuple[Any, ...]) -> Fact:
    """Named form of a raw fact."""
    return _TYPES[fact[0]](*fact[1:])  # type: ignore[no-any-return]


def group_of(key: bytes) -> int:
    """Group index of an offload key (vLLM's ``get_offload_group_idx``)."""
    return int.from_bytes(key[-4:], "big")


_group_bytes = itemgetter(slice(-4, None))


def count_by_group(keys: Iterable[bytes]) -> Counter[int]:
    """Chunks per KV-cache group."""
    counts = Counter(map(_group_bytes, keys))
    return Counter({group_of(name): count for name, count in counts.items()})
