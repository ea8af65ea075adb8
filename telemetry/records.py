"""What kvlens knows about an engine, a request, a lookup, a store and a load.

Plain data: the connector builds it, OTLP carries it as JSON, the dashboard
stores it. Times are Unix seconds (float), durations seconds, sizes bytes,
boundaries and counts of tokens are tokens counted from the prompt's start.
Neither prompt text nor token ids nor whole block hashes are ever part of it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvlens.telemetry import semconv

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""A number of something, or an index; its range is checked when a record is read, as of the next
two, so that no sum and no chart of them can overflow."""
Group = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
"""Index of a KV-cache group."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""A duration, or a time since 1970."""
Range = tuple[Count, Count]
"""``(first, last)``, inclusive, of chunk indexes."""


class Struct(msgspec.Struct, kw_only=True):
    """Base of all records: keyword-only, every field always written, unknown ones ignored."""


class GroupLayout(Struct):
    """One KV-cache group as the offload connector sees it."""

    kv_group: Group
    group_kind: str
    tokens_per_block: Count
    tokens_per_chunk: Count
    window: Count | None = None
    """Sliding window in tokens, None for other kinds."""
    extra_retained: Count = 0
    """Tokens retained beyond the window (vLLM's ``extra_retained_tokens``)."""
    attention_chunk: Count | None = None
    """Size of a local-attention chunk in tokens, None for other kinds."""
    drafter: bool = False
    """Annotated in ``kv_cache_groups`` as holding drafter layers."""
    drafter_used: bool = False
    """Treated by the connector as a drafter group: its last chunk is popped."""
    hash_lookahead: Count = 0
    """Tokens after a block that its hash covers as well (0.34): the block has a key only once they
    are there, and fits what follows, so that no drafter's chunk is volatile."""

    @property
    def recurrent(self) -> bool:
        """Whether the group holds states (one per chunk) instead of keys and values."""
        return self.group_kind == semconv.GroupKind.MAMBA

    @property
    def full_attention(self) -> bool:
        """Whether every earlier token is needed: so too for kinds that kvlens does not know."""
        return self.window is None and self.attention_chunk is None and not self.recurrent

    @property
    def pop(self) -> int:
        """Chunks beyond a boundary that must be there as well: 1 for a drafter group."""
        return int(self.drafter and not self.hash_lookahead)

    def chunks(self, tokens: int) -> int:
        """Chunks of so many tokens that have a key."""
        return max(0, tokens - self.hash_lookahead) // self.tokens_per_chunk


class Layout(Struct):
    """All offloaded groups, in group order, and what they share."""

    groups: list[GroupLayout]
    tokens_per_hash: Count
    blocks_per_chunk: Count = 1
    partial_tail: bool = False
    """Whether this vLLM and layout serve a partial last block."""
    cap_spares_token: bool = True
    """Whether this vLLM lowers a limit on what is loaded by the token that windows leave over."""

    def by_group(self) -> dict[int, GroupLayout]:
        """Groups by ``kv_group``."""
        return {group.kv_group: group for group in self.groups}

    @property
    def hash_lookahead(self) -> int:
        """Tokens after a block that its hash covers, in whichever group."""
        return max((group.hash_lookahead for group in self.groups), default=0)

    @property
    def largest_chunk(self) -> int:
        """Tokens of the coarsest group's chunk."""
        return max(group.tokens_per_chunk for group in self.groups)


class Correction(Struct):
    """State of one correction on this engine."""

    name: str
    state: str
    """``active``, ``not_needed``, ``off`` or ``unknown``."""
    reason: str = ""


class EngineInfo(Struct):
    """One incarnation of one engine; rides on every span's resource."""

    engine_id: str
    incarnation_id: str
    model: str
    started_at: Seconds
    kvlens_version: str
    vllm_version: str
    layout: Layout
    lookup: str = "corrected"
    corrections: list[Correction] = []
    dp_rank: Count = 0
    devices: Count = 1
    """Devices that compute each token: tensor times pipeline parallel size."""
    host: str = ""
    block_drop: bool = False
    """Whether speculative decoding drops the volatile last block."""
    widens: bool = True
    """Whether the search asks every drafter group for one chunk more than it keeps."""
    load_window: bool = True
    """Whether the search asks windowed groups as far back as a load will reach."""
    capacity_chunks: Count | None = None
    offload_prompt_only: bool = True
    store_threshold: Count = 0
    retention_interval: Count | None = None
    """Tokens between the windows that are kept besides a prompt's last; None: all are."""
    persistent_tier: bool = False
    """Whether a tier outlives the engine (files, object store)."""
    lower_tiers: bool = False
    """Whether there are tiers below the one that is watched; nobody tells what is in them."""
    hash_seed_fixed: bool = True
    """Whether the same prompt has the same block hashes in every process."""
    connector: str = "OffloadingConnector"
    """Name of the connector that is watched, as configured."""
    depth: str = str(semconv.Depth.GROUPS)
    """``groups`` or ``interface``: how far into the engine this connector sees."""
    tested: bool = True
    """Whether kvlens was tested with this vLLM release."""
    not_seen: list[str] = []
    """What is not recorded on this engine, one sentence each, with the symbol that is missing."""
    schema_version: int = semconv.SCHEMA_VERSION


class GroupLookup(Struct):
    """One query of one group within a lookup; ``pass_number`` 0 = never asked."""

    kv_group: Group
    group_kind: str
    tokens_per_chunk: Count
    drafter: bool = False
    """Treated as a drafter group in this lookup."""
    start_chunk: Count = 0
    width: Count = 0
    raw_hits: Count | None = None
    """Hits before the pop; None when the backend deferred."""
    popped: Count = 0
    boundary: Count = 0
    """Boundary confirmed after this query, in tokens."""
    pass_number: Count = 0
    resident: list[Range] = []
    """Resident chunks of this group when the lookup ran."""
    truncated: bool = False
    state_chunk: Count | None = None
    """Recurrent groups, when served: index of the chunk whose state is loaded."""


class Lookup(Struct):
    """One answered lookup, or a run of identical ones that were deferred or not admitted."""

    time: Seconds
    seconds: Seconds
    local_tokens: Count
    num_tokens: Count
    attempt: Count
    exit: str
    result: Count | None = None
    """Tokens answered beyond the local ones; None when deferred."""
    last_time: Seconds | None = None
    count: Count = 1
    groups: list[GroupLookup] = []
    vetoing_group: Group | None = None
    cap: Count | None = None
    """At most that many tokens beyond the local ones could be loaded, if limited."""
    load_cap: Count | None = None
    """The request's own ``max_load_tokens``, a part of ``cap``."""


class GroupChunks(Struct):
    """Chunk counts of one group in a store or a load."""

    kv_group: Group
    offered: Count = 0
    stored: Count = 0
    held_back: Count = 0
    refused: Count = 0
    already: Count = 0
    excluded: Count = 0
    loaded: Count = 0


class Store(Struct):
    """One store decision and, if something was stored, its job."""

    time: Seconds
    job_id: int | None = None
    groups: list[GroupChunks] = []
    evictions: Count = 0
    refused: bool = False
    failed: bool = False
    """Its transfer failed: none of it is in the tier."""
    completed_at: Seconds | None = None
    bytes: Count | None = None
    transfer_seconds: Seconds | None = None


class Load(Struct):
    """One load job of an admitted request."""

    job_id: int
    time: Seconds
    groups: list[GroupChunks] = []
    completed_at: Seconds | None = None
    failed: bool = False
    """Its transfer failed: nothing of it was served."""
    latency: Seconds | None = None
    """From allocation until the scheduler saw it finished; None if it failed."""
    bytes: Count | None = None
    transfer_seconds: Seconds | None = None
    synchronous: bool = False


class RequestRecord(Struct):
    """Everything known about one finished request."""

    request_id: str
    """The client's id (``gen_ai.request.id`` of vLLM's ``llm_request`` span)."""
    internal_request_id: str
    engine_id: str
    incarnation_id: str
    model: str
    arrival_time: Seconds
    finish_time: Seconds
    prompt_tokens: Count
    verdict: str
    started_at: Seconds | None = None
    """When the step left that computed its first tokens, the end of all waiting; None: none did."""
    schema_version: int = semconv.SCHEMA_VERSION
    dp_rank: Count = 0
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    local_tokens: Count = 0
    served_tokens: Count = 0
    servable_tokens: Count = 0
    expected_tokens: Count = 0
    lost_tokens: Count = 0
    lost_at_lookup: Count = 0
    lost_at_store: Count = 0
    computed_tokens: Count | None = None
    """Prompt tokens that the model computed; None if it never ran."""
    failed_tokens: Count = 0
    """Tokens whose load failed after the request had been admitted with them; no part of served."""
    other_tokens: Count = 0
    """Tokens that another connector loaded (MultiConnector)."""
    evicted_tokens: Count = 0
    """Tokens computed again because capacity had evicted their chunks; no part of ``lost``."""
    lost_gpu_seconds: Seconds = 0.0
    """Device time of computing lost and evicted tokens, at the engine's own prefill rate."""
    tier_tokens: dict[str, Count] = {}
    """Tokens loaded, by tier, where vLLM tells (0.32 and newer)."""
    ghost_chunks: Count = 0
    """Chunks of this request that the tier had stored, evicted and was offered again."""
    ghost_distance: Count = 0
    """The most chunks evicted between the eviction of one of those and its return."""
    reuse_distance: Count | None = None
    """The most distinct chunks used between two uses of a sampled chunk; None: no second use."""
    prefix_blocks: list[Range] = []
    """The prompt's complete blocks as this engine numbered them: equal numbers, equal prefixes."""
    prefix_block_tokens: Count = 0
    """Tokens of such a block, a whole number of chunks; 0: not numbered."""
    cause: str | None = None
    causes: list[str] = []
    """All equally small explanations; the first is ``cause``."""
    confidence: str = str(semconv.Confidence.CERTAIN)
    vetoing_group: Group | None = None
    summary: str = ""
    """One sentence that says what happened, with the numbers."""
    evidence: dict[str, Any] = {}
    next_step: str = ""
    lookups: list[Lookup] = []
    stores: list[Store] = []
    loads: list[Load] = []
    deferral_seconds: Seconds = 0.0
    output_tokens: Count = 0
    finish_reason: str = ""
    preemptions: Count = 0
    sampling_probability: float = 1.0
    resident_chunks: dict[Group, Count] = {}
    """Chunks in the tier when the record was made, by ``kv_group``."""
    dropped: Count = 0
    """Facts, spans and records that this engine had dropped until then."""
    truncated: bool = False
    """Details were dropped to keep the JSON within its limit."""
    depth: str = str(semconv.Depth.GROUPS)
    """``groups`` or ``interface``: how far its engine's connector sees."""
    connector: str = "OffloadingConnector"
    """The connector that was asked."""

    @property
    def eligible_tokens(self) -> int:
        """Tokens this request could have got from the offload tier."""
        return max(self.expected_tokens, self.servable_tokens)


_encoder = msgspec.json.Encoder()
_record_decoder = msgspec.json.Decoder(RequestRecord)
_engine_decoder = msgspec.json.Decoder(EngineInfo)


class RecordError(ValueError):
    """A record that cannot be read; the message says what is wrong with it."""


def encode(record: RequestRecord | EngineInfo) -> str:
    """Encode as compact JSON text."""
    return _encoder.encode(record).decode()


def encode_bounded(record: RequestRecord, limit: int = semconv.RECORD_MAX_BYTES) -> str:
    """Encode within ``limit`` bytes, dropping detail from the middle if needed.

    The totals, the verdict and the last lookup are always kept.
    """
    data = _encoder.encode(record)
    if len(data) <= limit:
        return data.decode()
    slim = msgspec.structs.replace(record, truncated=True, stores=[], loads=record.loads[:4])
    for keep in (8, 2, 1):
        slim = msgspec.structs.replace(slim, lookups=slim.lookups[-keep:])
        data = _encoder.encode(slim)
        if len(data) <= limit:
            return data.decode()
    slim = msgspec.structs.replace(slim, lookups=[], evidence={})
    return _encoder.encode(slim).decode()


def decode_record(data: str | bytes) -> RequestRecord:
    """Decode a RequestRecord; raises :class:`RecordError`."""
    record: RequestRecord = _checked(_record_decoder, data, "record")
    return record


def decode_engine(data: str | bytes) -> EngineInfo:
    """Decode an EngineInfo; raises :class:`RecordError`."""
    info: EngineInfo = _checked(_engine_decoder, data, "engine")
    return info


def _checked(decoder: msgspec.json.Decoder[Any], data: str | bytes, what: str) -> Any:
    try:
        value = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RecordError(f"not a kvlens {what}: {error}") from error
    if value.schema_version > semconv.SCHEMA_VERSION:
        raise RecordError(
            f"kvlens {what} has schema version {value.schema_version}, this program reads up to "
            f"{semconv.SCHEMA_VERSION}: upgrade kvlens here"
        )
    return value
