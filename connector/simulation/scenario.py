"""What a scenario file says: a layout of KV-cache groups, an engine and what happens to it.

Every field but ``layout`` and ``steps`` has a default. ``docs/scenarios.md``
explains each of them; :mod:`kvlens.connector.simulation.reading` reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
ChunkList = list[int | str]
"""Chunk indexes and ranges such as ``"10-20"``, both ends included, or ``"10-"``."""


class Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a scenario: what it does not know is an error."""


class Group(Part):
    """One KV-cache group."""

    kind: Literal["full_attention", "sliding_window", "chunked_local", "mamba"]
    tokens_per_block: Positive
    window: Positive | None = None
    """Tokens that a sliding-window group attends to."""
    attention_chunk: Positive | None = None
    """Tokens of a local-attention chunk."""
    drafter: bool = False
    """Annotated as holding drafter layers (``is_eagle_group``)."""
    bytes_per_block: Positive | None = None
    """What a block's KV data takes, over all layers and devices; read by ``kvlens size`` only."""

    def __post_init__(self) -> None:
        for field, kind in (("window", "sliding_window"), ("attention_chunk", "chunked_local")):
            given = getattr(self, field) is not None
            if self.kind == kind and not given:
                raise ValueError(f"a {kind} group needs `{field}` (tokens)")
            if given and self.kind != kind:
                raise ValueError(f"`{field}` belongs to {kind} groups, this one is {self.kind}")


class Layout(Part):
    """The KV-cache groups of a model and how they are offloaded."""

    groups: Annotated[list[Group], msgspec.Meta(min_length=1)]
    tokens_per_hash: Positive | None = None
    """Tokens per block hash; vLLM's own choice (largest common divisor) by default."""
    blocks_per_chunk: Positive = 1
    mamba_cache_mode: Literal["align", "all"] = "align"
    """``all`` exists up to vLLM 0.31."""

    def __post_init__(self) -> None:
        for index, group in enumerate(self.groups):
            if self.tokens_per_hash and group.tokens_per_block % self.tokens_per_hash:
                raise ValueError(
                    f"`tokens_per_hash` must divide the block of every group: "
                    f"{self.tokens_per_hash} does not divide {group.tokens_per_block} (group "
                    f"{index})"
                )
        states = {group.tokens_per_block for group in self.groups if group.kind == "mamba"}
        if len(states) > 1:
            raise ValueError(
                f"`groups`: vLLM wants one block size for all mamba groups, these have "
                f"{', '.join(map(str, sorted(states)))}"
            )


class TransferSteps(Part):
    """How many engine steps a transfer takes."""

    store: Positive = 1
    load: Positive = 1


class Prompt(Part):
    """Tokens, made up from a seed: equal seeds share their prefix, whatever their lengths."""

    seed: int
    tokens: Positive
    diverge_after: NotNegative | None = None
    """From here on the tokens are unlike those of every other request."""
    continues: Positive | None = None
    """Number of an earlier request (from 1) whose prompt and output these tokens begin with."""

    def __post_init__(self) -> None:
        if self.diverge_after is not None and self.diverge_after > self.tokens:
            raise ValueError(
                f"`diverge_after` must lie within the prompt: {self.diverge_after} of {self.tokens}"
            )


class Selection(Part):
    """Which of a prompt's chunks reach the tier."""

    drop_chunks: dict[int, ChunkList] = {}
    """By group: chunks that are never offered to the tier."""
    only_chunks: dict[int, ChunkList] = {}
    """By group: the only chunks that are."""

    def __post_init__(self) -> None:
        for field in ("drop_chunks", "only_chunks"):
            for chunks in getattr(self, field).values():
                for item in chunks:
                    try:
                        chunk_range(item)
                    except ValueError as error:
                        raise ValueError(f"`{field}`: {error}") from None

    def keeps(self, kv_group: int, chunk: int) -> bool:
        """Whether that chunk may be offered."""
        only = self.only_chunks.get(kv_group)
        return (only is None or _among(chunk, only)) and not _among(
            chunk, self.drop_chunks.get(kv_group, ())
        )


class Serve(Selection, kw_only=True):
    """Step: requests that are served until they end."""

    prompt: Prompt
    max_tokens: Positive = 8
    times: Positive = 1
    """One after the other."""
    together: bool = False
    """All at once instead."""
    unique: bool = False
    """Each with a seed of its own: ``seed``, ``seed + 1``, ..."""
    skip_reading_prefix_cache: bool = False
    max_load_tokens: NotNegative | None = None
    max_offload_tokens: NotNegative | None = None
    abort_after: Seconds | None = None
    """The client gives up after so many (simulated) seconds."""


class Store(Selection, kw_only=True):
    """Step: chunks of a prompt are in the tier, without having been computed here."""

    store: Prompt


class ResetGpuCache(Part):
    """Step: the GPU prefix cache is emptied."""

    reset_gpu_cache: Literal[True]


class ResetOffloadCache(Part):
    """Step: the offload tier is emptied."""

    reset_offload_cache: Literal[True]


class Wait(Part):
    """Step: simulated time passes."""

    wait: Seconds


class BackendState(Part):
    """How the tier behaves from here on."""

    stores: Literal["complete", "hang", "fail"] = "complete"
    """``fail``: their transfers end without success; before 0.34 that ends the engine."""
    loads: Literal["complete", "hang", "fail"] = "complete"
    lookups: Literal["answer", "retry"] = "answer"
    """``retry``: what would be a hit is answered with "ask again later"."""


class Backend(Part):
    """Step: the tier changes its behaviour."""

    backend: BackendState


class Repeat(Part):
    """Step: other steps, several times."""

    repeat: Positive
    steps: list[Any]
    """Steps, once they have been read."""


Step = Serve | Store | ResetGpuCache | ResetOffloadCache | Wait | Backend | Repeat

STEPS: dict[str, type[Any]] = {
    "prompt": Serve,
    "store": Store,
    "reset_gpu_cache": ResetGpuCache,
    "reset_offload_cache": ResetOffloadCache,
    "wait": Wait,
    "backend": Backend,
    "repeat": Repeat,
}
"""Kinds of steps, by the field that tells them apart."""


class Scenario(Part):
    """A whole scenario."""

    layout: Layout
    steps: list[Any]
    """Steps, once they have been read."""
    description: str = ""
    speculative: Literal["none", "mtp", "eagle"] = "none"
    lookahead_hashes: bool | Literal["default"] = "default"
    """Whether block hashes cover the token after the block (vLLM 0.34 and newer; true there by
    default with ``speculative``), so that nothing is volatile."""
    draft_tokens: Positive = 2
    """Tokens drafted per step of a request."""
    accepted_tokens: list[NotNegative] = []
    """Drafted tokens that the target accepts, step by step, over and over; all by default."""
    capacity_chunks: Positive = 4096
    gpu_blocks: Annotated[int, msgspec.Meta(ge=2)] = 4096
    gpu_prefix_cache: bool = True
    async_scheduling: bool = False
    offload_prompt_only: bool = True
    store_threshold: NotNegative = 0
    retention_interval: NotNegative | Literal["default", "all"] = "default"
    """Tokens between the windows and states that are kept, besides those at a prompt's end."""
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    """vLLM's ``kv_load_failure_policy``: what becomes of a request whose load fails."""
    max_batched_tokens: Positive = 8192
    max_requests: Positive = 64
    """Requests that run at a time."""
    transfer_steps: TransferSteps = msgspec.field(default_factory=TransferSteps)
    step_seconds: Seconds = 0.02
    """Simulated time of one engine step."""
    patience: Seconds = 3600.0
    """Simulated seconds after which a step that does not end is an error."""


def chunk_range(item: int | str) -> range:
    """``7``, ``"7-9"`` or ``"7-"`` as a range of chunk indexes; raises :class:`ValueError`."""
    first, dash, last = str(item).partition("-")
    if first.isdecimal() and (last.isdecimal() or not last):
        end = int(last) if last else (1 << 31 if dash else int(first))
        if end >= int(first):
            return range(int(first), end + 1)
    raise ValueError(f'{item!r} is neither a chunk index nor a range such as "10-20" or "10-"')


def _among(chunk: int, items: Sequence[int | str]) -> bool:
    return any(chunk in chunk_range(item) for item in items)
