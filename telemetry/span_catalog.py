"""What each span and attribute tells: the source of docs/spans.md.

Names come from :mod:`semconv`. A test fails when something declared there is not
explained here, when a span has an attribute of another type, or when the document
has drifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvlens.telemetry import semconv as s


@dataclass(frozen=True)
class Attribute:
    """One attribute of a resource or a span."""

    name: str
    type: str
    meaning: str
    unit: str = ""
    """UCUM, as of metrics; empty for what is no quantity."""
    values: tuple[str, ...] = ()
    """The closed set that it is one of, if it is."""


@dataclass(frozen=True)
class SpanDoc:
    """One kind of span."""

    name: str
    meaning: str
    parent: str
    question: str
    query: str
    """TraceQL, as Grafana Tempo takes it."""
    attributes: tuple[Attribute, ...]


def _words(enum: type[s.Word]) -> tuple[str, ...]:
    return tuple(str(member) for member in enum)


def _tokens(name: str, meaning: str) -> Attribute:
    return Attribute(name, "int", meaning, "{token}")


def _find(span: str, condition: str) -> str:
    return f'{{ name = "{span}" && {condition} }}'


_LOCAL = _tokens(s.ATTR_LOCAL_TOKENS, "tokens that the GPU cache covered")
_ID = Attribute(s.ATTR_GEN_AI_REQUEST_ID, "string", "request id, as on vLLM's `llm_request`")
_RECORD = Attribute(
    s.ATTR_RECORD, "string", f"RequestRecord as JSON, at most {s.RECORD_MAX_BYTES // 1024} KiB"
)
_REQUEST: Final = (
    _ID,
    Attribute(s.ATTR_GEN_AI_MODEL, "string", "served model name"),
    Attribute(
        s.ATTR_VERDICT, "string", "what became of the reusable tokens", values=_words(s.Verdict)
    ),
    Attribute(
        s.ATTR_CAUSE, "string", "why tokens were lost; absent if none were", values=_words(s.Cause)
    ),
    Attribute(s.ATTR_CONFIDENCE, "string", "how sure the cause is", values=_words(s.Confidence)),
    Attribute(s.ATTR_VETOING_GROUP, "int", "group that brought the lookup to zero, if one did"),
    _tokens(s.ATTR_PROMPT_TOKENS, "tokens of the prompt"),
    _LOCAL,
    _tokens(s.ATTR_SERVED_TOKENS, "tokens loaded from the offload tier"),
    _tokens(s.ATTR_OTHER_TOKENS, "tokens that another connector loaded; absent if it loaded none"),
    _tokens(s.ATTR_COMPUTED_TOKENS, "prompt tokens computed; absent if it never ran"),
    _tokens(s.ATTR_SERVABLE_TOKENS, "tokens that were resident and could be served"),
    _tokens(s.ATTR_EXPECTED_TOKENS, "the same, had all been stored and kept"),
    _tokens(s.ATTR_LOST_TOKENS, "tokens computed that should have been served"),
    _tokens(s.ATTR_EVICTED_TOKENS, "tokens computed again that capacity had evicted"),
    Attribute(
        s.ATTR_LOST_GPU_SECONDS, "double", "device time of computing lost and evicted tokens", "s"
    ),
    _RECORD,
)
_JOB: Final = (
    Attribute(s.ATTR_JOB_ID, "int", "vLLM's transfer job"),
    Attribute(s.ATTR_BYTES, "int", "bytes moved, once known", "By"),
    Attribute(s.ATTR_JOB_FAILED, "boolean", "whether the transfer failed: nothing was moved"),
    Attribute(s.ATTR_GROUPS, "int[]", "groups, in group order"),
    Attribute(s.ATTR_GROUP_CHUNKS, "int[]", "chunks moved, per group", "{chunk}"),
)
METRIC_RESOURCE: Final = (
    Attribute(s.ATTR_ENGINE_ID, "string", "`engine_id` of vLLM's KV-transfer configuration"),
    Attribute(s.ATTR_DP_RANK, "int", "data-parallel rank"),
)
RESOURCE: Final = (
    Attribute(s.ATTR_SERVICE_NAME, "string", f"`{s.SERVICE_NAME}`"),
    Attribute(s.ATTR_SERVICE_VERSION, "string", "version of kvlens"),
    Attribute(s.ATTR_SERVICE_INSTANCE, "string", "incarnation of the engine: new at each start"),
    Attribute(s.ATTR_ENGINE, "string", "EngineInfo as JSON: model, layout, corrections"),
)
SPANS: Final = (
    SpanDoc(
        s.SPAN_REQUEST,
        "One finished request, from its arrival to its end.",
        "the client's span: a sibling of vLLM's `llm_request`",
        "Which requests were served nothing although they should have been, and why?",
        _find(s.SPAN_REQUEST, f'span.{s.ATTR_VERDICT} = "{s.Verdict.LOST}"')
        + f" | select(span.{s.ATTR_CAUSE}, span.{s.ATTR_LOST_TOKENS})",
        _REQUEST,
    ),
    SpanDoc(
        s.SPAN_LOOKUP,
        "One lookup, or a run of equal deferred ones; the last 32.",
        f"`{s.SPAN_REQUEST}`",
        "Which lookups were brought to zero by one group?",
        _find(s.SPAN_LOOKUP, f'span.{s.ATTR_EXIT} = "{s.Exit.VETOED}"'),
        (
            Attribute(s.ATTR_EXIT, "string", "how it ended", values=_words(s.Exit)),
            Attribute(s.ATTR_ATTEMPT, "int", "number of the attempt, from 1"),
            Attribute(s.ATTR_COUNT, "int", "equal lookups in a row", "{lookup}"),
            _LOCAL,
            Attribute(s.ATTR_GROUPS, "int[]", "groups asked, in the order of asking"),
            Attribute(s.ATTR_GROUP_WIDTHS, "int[]", "chunks asked for, per group", "{chunk}"),
            Attribute(
                s.ATTR_GROUP_HITS, "int[]", "chunks found before the pop; -1: deferred", "{chunk}"
            ),
            Attribute(s.ATTR_GROUP_POPS, "int[]", "chunks popped, per group", "{chunk}"),
        ),
    ),
    SpanDoc(
        s.SPAN_LOAD,
        "One load, from allocation until the scheduler saw it finished; the last 32.",
        f"`{s.SPAN_REQUEST}`",
        "Which reloads took over a second?",
        _find(s.SPAN_LOAD, f"span.{s.ATTR_RELOAD_LATENCY} > 1.0"),
        (*_JOB, Attribute(s.ATTR_RELOAD_LATENCY, "double", "its length", "s")),
    ),
    SpanDoc(
        s.SPAN_STORE,
        "One store job, in a trace of its own; the last 32.",
        f"none: linked to its `{s.SPAN_REQUEST}`",
        "Which stores took long to complete?",
        _find(s.SPAN_STORE, "duration > 1s"),
        _JOB,
    ),
    SpanDoc(
        s.SPAN_DEFERRAL,
        "A request that has waited for over 1 s; repeated every 5 s, before the request ends.",
        "the client's span",
        "Which requests wait for the tier, or did?",
        _find(s.SPAN_DEFERRAL, f"span.{s.ATTR_DEFERRED_FOR} > 10.0"),
        (*_REQUEST, Attribute(s.ATTR_DEFERRED_FOR, "double", "how long so far", "s")),
    ),
    SpanDoc(
        s.SPAN_ENGINE,
        "Sent when an engine's connector starts, every minute while it lives, and when it stops.",
        "none",
        "When did engines start and stop?",
        _find(s.SPAN_ENGINE, f'span.{s.ATTR_ENGINE_STATE} != "{s.ENGINE_ALIVE}"'),
        (
            Attribute(
                s.ATTR_ENGINE_STATE,
                "string",
                "what it does",
                values=(s.ENGINE_STARTED, s.ENGINE_ALIVE, s.ENGINE_STOPPED),
            ),
        ),
    ),
)
