"""Every private name of vLLM that kvlens stands on, as data: the one list of them.

vLLM's offloading modules change with every release. Each entry says where a name
lives, which parameters it must take, in which releases it is to be there and what is
lost without it. :func:`check` looks at the vLLM that is installed; what is missing
takes away only what depends on it (``support.py``).

Standard library only, and vLLM is imported by name: nothing here can fail to import.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packaging.version import Version

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_SCHEDULER = f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler"
_STATE = f"{_OFFLOADING}.scheduler:RequestOffloadState"
_GROUP_STATE = f"{_OFFLOADING}.scheduler:RequestGroupState"
_GROUP = f"{_OFFLOADING}.scheduler:GroupOffloadConfig"
_CONFIG = f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig"
_JOB = f"{_OFFLOADING}.scheduler:TransferJobStatus"
_MANAGERS = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"


class Part(str, Enum):
    """What depends on a symbol; the value says what is lost without it."""

    GROUPS = "groups depth: widths, pops, vetoes and causes, and every correction"
    LOOKUP = "corrected and exact lookups: vLLM's own search answers"
    TRANSFERS = "size and device time of each transfer"
    METRICS = "kvlens_* on vLLM's /metrics (OTLP still carries them)"
    MANAGER = "chunks stored, evicted and resident at interface depth"
    DRAFTER_FALLBACK = "the correction drafter_fallback"
    POP_WIDENING = "the correction pop_widening"
    HELD_BACK_TAIL = "the correction held_back_tail"
    LOAD_START = "the correction load_start"
    TOKEN_WATERMARK = "the correction token_watermark"
    REACHABLE_WINDOW = "the correction reachable_window"

    @property
    def correction(self) -> str | None:
        """Name of the correction that is lost, if it is one."""
        name = self.name.lower()
        return name if self.value == f"the correction {name}" else None


@dataclass(frozen=True)
class Symbol:
    """A class, method, field or attribute of vLLM."""

    owner: str
    """``module:class``, or a module."""
    name: str
    part: Part
    parameters: tuple[str, ...] | None = None
    """Of a method: parameters that it must have; None: it is a field or an attribute."""
    exact: bool = False
    """Whether these must come first and in this order, with no other required ones."""
    since: str = "0.27.1"
    until: str | None = None
    """The first release without it, or in which nothing needs it any more."""

    @property
    def path(self) -> str:
        """``Class.name``, for people."""
        return f"{self.owner.rpartition(':')[2].rpartition('.')[2]}.{self.name}"

    def expected_in(self, version: Version | None) -> bool:
        """Whether that release should have it; an unknown one should have all that last."""
        if version is None:
            return self.until is None
        later = self.until is not None and Version(version.base_version) >= Version(self.until)
        return Version(version.base_version) >= Version(self.since) and not later


def _methods(owner: str, part: Part, **parameters: str) -> tuple[Symbol, ...]:
    return tuple(
        Symbol(owner, name, part, tuple(names.split())) for name, names in parameters.items()
    )


def _fields(owner: str, part: Part, names: str, **releases: str) -> tuple[Symbol, ...]:
    return tuple(Symbol(owner, name, part, **releases) for name in names.split())  # type: ignore[arg-type]


SYMBOLS: tuple[Symbol, ...] = (
    Symbol(_CONNECTOR, "OffloadingConnectorScheduler", Part.GROUPS),
    *_methods(
        _SCHEDULER,
        Part.GROUPS,
        __init__="spec vllm_config kv_cache_config",
        _maximal_prefix_lookup="keys",
        _sliding_window_lookup="keys sliding_window_size",
        get_num_new_matched_tokens="request num_computed_tokens",
        update_state_after_alloc="request blocks num_external_tokens",
        build_connector_meta="scheduler_output",
        update_connector_output="connector_output",
        request_finished="request",
        on_new_request="request",
        reset_cache="",
        get_stats="",
    ),
    *_fields(_SCHEDULER, Part.GROUPS, "config manager _req_status _jobs _current_batch_load_jobs"),
    *_fields(_STATE, Part.GROUPS, "req group_states transfer_jobs num_locally_computed_tokens"),
    *_fields(_GROUP_STATE, Part.GROUPS, "offload_keys"),
    *_fields(
        _GROUP,
        Part.GROUPS,
        "group_idx tokens_per_block tokens_per_chunk hashes_per_chunk is_eagle_group "
        "sliding_window_size_in_chunks",
    ),
    *_fields(_CONFIG, Part.GROUPS, "kv_group_configs blocks_per_chunk"),
    *_fields(_JOB, Part.GROUPS, "keys"),
    *_methods(_CONFIG, Part.GROUPS, from_spec="spec vllm_config kv_cache_config"),
    Symbol(_SCHEDULER, "_lookup", Part.LOOKUP, ("req_status",), exact=True),
    Symbol(_SCHEDULER, "_lookup_complete_chunks", Part.LOOKUP, ("req_status",), True, "0.28.0"),
    *_fields(_SCHEDULER, Part.LOOKUP, "_events_tracker _chunks_being_loaded _mamba_align_size"),
    *_fields(_STATE, Part.LOOKUP, "req_context"),
    *_fields(_STATE, Part.LOOKUP, "partial_tail_boundary", since="0.28.0"),
    *_fields(_CONFIG, Part.LOOKUP, "supports_partial_tail", since="0.28.0"),
    Symbol(
        _SCHEDULER, "_maximal_prefix_lookup", Part.POP_WIDENING,
        ("keys", "req_context", "req", "group_config", "start_chunk_idx"), True, until="0.30.0",
    ),
    Symbol(
        _STATE, "storable_chunks", Part.HELD_BACK_TAIL,
        ("group_config", "group_state", "num_offloadable_tokens"), True, until="0.30.0",
    ),
    Symbol(
        _SCHEDULER, "update_state_after_alloc", Part.LOAD_START,
        ("request", "blocks", "num_external_tokens"), True, until="0.30.0",
    ),
    Symbol(
        _SCHEDULER, "_calc_num_offloadable_tokens", Part.TOKEN_WATERMARK,
        ("req_status", "num_computed_tokens"), True, until="0.30.0",
    ),
    Symbol(
        _SCHEDULER, "_reachable_store_block_mask", Part.REACHABLE_WINDOW,
        ("group_config", "start_chunk_idx", "end_chunk_idx", "reachable_boundaries"),
        since="0.30.0",
    ),
    Symbol(
        _SCHEDULER, "_maybe_register_shared_prefix_junction", Part.REACHABLE_WINDOW,
        ("req_status", "boundary", "num_hit_tokens"), since="0.34.0",
    ),
    *_fields(_SCHEDULER, Part.LOOKUP, "use_lookahead_block_hashes", since="0.34.0"),
    *_fields(f"{_OFFLOADING}.common:OffloadingWorkerMetadata", Part.TRANSFERS,
             "completed_jobs transfer_stats"),
    Symbol(f"{_OFFLOADING}.metrics", "OffloadingConnectorStats", Part.METRICS),
    Symbol(f"{_OFFLOADING}.metrics", "OffloadPromMetrics", Part.METRICS),
    Symbol(f"{_MANAGERS}.factory:OffloadingSpecFactory", "create_spec", Part.MANAGER, ()),
)  # fmt: skip
"""In the order in which ``kvlens compat`` lists them."""


@dataclass(frozen=True)
class Found:
    """What became of one symbol in the vLLM that is installed."""

    symbol: Symbol
    problem: str = ""
    """Why it cannot be used; empty if it can."""
    signature: str = ""
    """As installed, for a comparison of releases."""


def check(version: Version | None, symbols: tuple[Symbol, ...] | None = None) -> list[Found]:
    """Look for every symbol that ``version`` should have."""
    wanted = SYMBOLS if symbols is None else symbols
    return [_look(symbol) for symbol in wanted if symbol.expected_in(version)]


def _look(symbol: Symbol) -> Found:
    module, _, cls = symbol.owner.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - another vLLM may raise anything while imported
        return Found(symbol, f"{module} cannot be imported: {type(error).__name__}: {error}")
    if cls and (owner := getattr(owner, cls, None)) is None:
        return Found(symbol, f"{cls} is gone")
    if symbol.parameters is None:
        return Found(symbol, "" if _has(owner, symbol.name) else f"{symbol.path} is gone")
    method = getattr(owner, symbol.name, None)
    if method is None:
        return Found(symbol, f"{symbol.path} is gone")
    return _compare(symbol, inspect.signature(method))


def _has(owner: Any, name: str) -> bool:
    """Whether a class declares a field, or its constructor sets an attribute, of that name."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    bases = getattr(owner, "__mro__", ())
    return any(
        name in getattr(getattr(base.__dict__.get("__init__"), "__code__", None), "co_names", ())
        for base in bases
    )


def _compare(symbol: Symbol, signature: inspect.Signature) -> Found:
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    wanted = symbol.parameters or ()
    problem = ""
    missing = [name for name in wanted if name not in names]
    if missing:
        problem = f"{symbol.path} no longer takes {', '.join(missing)}"
    elif symbol.exact:
        required = [
            name
            for name in names[len(wanted) :]
            if signature.parameters[name].default is inspect.Parameter.empty
            and signature.parameters[name].kind
            not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        if tuple(names[: len(wanted)]) != wanted or required:
            problem = f"{symbol.path} now takes ({', '.join(names)})"
    return Found(symbol, problem, f"({', '.join(names)})")
