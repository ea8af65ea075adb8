"""The client's trace context, from the headers that vLLM hands on."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def parent_ids(headers: Mapping[str, str] | None) -> tuple[str, str]:
    """``(trace id, span id)`` in hex of the caller's span; empty when there is none."""
    if not headers:
        return "", ""
    context = trace.get_current_span(_propagator.extract(headers)).get_span_context()
    if not context.is_valid:
        return "", ""
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"
