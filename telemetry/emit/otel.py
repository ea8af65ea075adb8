"""Records as OpenTelemetry spans over OTLP.

A tracer provider of our own, so that vLLM's sampling and its slower batches do
not apply; only the trace context is shared: ``kv_offload.request`` is a sibling
of vLLM's ``llm_request``, under the client's span, with the same
``gen_ai.request.id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvlens.telemetry import records, semconv
from kvlens.telemetry.emit import otlp
from kvlens.telemetry.emit.export_queue import ExportQueue
from kvlens.telemetry.records import EngineInfo, Lookup, RequestRecord

MAX_CHILDREN = 32
"""Lookup and load spans per request; the record has them all."""


class SpanSink:
    """Turns records into spans; nothing here waits for the receiver."""

    sampled = True
    dropped_metric = semconv.DROPPED_SPANS

    def __init__(self, info: EngineInfo, queue: ExportQueue) -> None:
        self._info = info
        self._queue = queue
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(
                {
                    semconv.ATTR_SERVICE_NAME: semconv.SERVICE_NAME,
                    semconv.ATTR_SERVICE_VERSION: info.kvlens_version,
                    semconv.ATTR_SERVICE_INSTANCE: info.incarnation_id,
                    semconv.ATTR_ENGINE: records.encode(info),
                }
            ),
            # A length limit from the environment would cut the record's JSON.
            span_limits=SpanLimits(
                max_attribute_length=SpanLimits.UNSET,
                max_span_attribute_length=SpanLimits.UNSET,
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(queue)
        self._tracer: Tracer = self._provider.get_tracer(semconv.SCOPE_NAME, info.kvlens_version)
        self._engine_state(semconv.ENGINE_STARTED)
        # An idle engine sends nothing else: without it, it could not be told from a dead one.
        queue.beat(lambda: self._engine_state(semconv.ENGINE_ALIVE))

    @classmethod
    def from_settings(
        cls,
        info: EngineInfo,
        endpoint: str | None,
        headers: Mapping[str, str],
        token: str | None,
        queue_size: int,
    ) -> SpanSink | None:
        """A sink for the configured receiver; None when none is.

        Raises :class:`otlp.OtlpError` for one that cannot be used.
        """
        to = otlp.receiver(endpoint)
        if to is None:
            return None
        exporter = otlp.span_exporter(to, otlp.with_token(headers, token))
        return cls(info, ExportQueue(exporter, to.endpoint, queue_size))

    @property
    def dropped(self) -> int:
        """Spans dropped so far."""
        return self._queue.dropped

    def request(self, record: RequestRecord) -> None:
        """Send a finished request: its span, and children for lookups and loads."""
        span = self._request_span(semconv.SPAN_REQUEST, record)
        # The ids are known only now that the span exists; the record carries them too.
        context = span.get_span_context()
        record.trace_id = f"{context.trace_id:032x}"
        record.span_id = f"{context.span_id:016x}"
        span.set_attribute(semconv.ATTR_RECORD, records.encode_bounded(record))
        parent = trace.set_span_in_context(span)
        for lookup in record.lookups[-MAX_CHILDREN:]:
            self._child(
                semconv.SPAN_LOOKUP,
                parent,
                lookup.time,
                (lookup.last_time or lookup.time) + lookup.seconds,
                _lookup_attributes(lookup),
            )
        for load in record.loads[-MAX_CHILDREN:]:
            attributes = _job_attributes(load, "loaded")
            if load.latency is not None:
                attributes[semconv.ATTR_RELOAD_LATENCY] = load.latency
            self._child(
                semconv.SPAN_LOAD, parent, load.time, load.completed_at or load.time, attributes
            )
        span.end(_ns(record.finish_time))
        for store in record.stores[-MAX_CHILDREN:]:
            if store.job_id is not None:
                self._store(span, store)

    def deferral(self, record: RequestRecord) -> None:
        """Send an in-flight record of a request that waits."""
        span = self._request_span(semconv.SPAN_DEFERRAL, record)
        span.set_attribute(semconv.ATTR_DEFERRED_FOR, record.deferral_seconds)
        span.set_attribute(semconv.ATTR_RECORD, records.encode_bounded(record))
        span.end(_ns(record.finish_time))

    def close(self) -> None:
        """Say that the engine stops, and send what is left."""
        self._queue.still()
        self._engine_state(semconv.ENGINE_STOPPED)
        self._provider.shutdown()

    def _engine_state(self, state: str) -> None:
        span = self._tracer.start_span(semconv.SPAN_ENGINE, kind=SpanKind.INTERNAL)
        span.set_attribute(semconv.ATTR_ENGINE_STATE, state)
        span.end()

    def _request_span(self, name: str, record: RequestRecord) -> Span:
        context = None
        if record.parent_span_id:
            header = f"00-{record.trace_id}-{record.parent_span_id}-01"
            context = TraceContextTextMapPropagator().extract({"traceparent": header})
        return self._tracer.start_span(
            name,
            context=context,
            kind=SpanKind.INTERNAL,
            start_time=_ns(record.arrival_time),
            attributes=_request_attributes(record),
        )

    def _child(
        self,
        name: str,
        parent: Any,
        start: float,
        end: float,
        attributes: dict[str, AttributeValue],
    ) -> None:
        span = self._tracer.start_span(
            name, context=parent, start_time=_ns(start), attributes=attributes
        )
        span.end(_ns(max(start, end)))

    def _store(self, request: Span, store: records.Store) -> None:
        span = self._tracer.start_span(
            semconv.SPAN_STORE,
            context=Context(),
            links=[trace.Link(request.get_span_context())],
            start_time=_ns(store.time),
            attributes=_job_attributes(store, "stored"),
        )
        span.end(_ns(store.completed_at or store.time))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _request_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        semconv.ATTR_GEN_AI_REQUEST_ID: record.request_id,
        semconv.ATTR_GEN_AI_MODEL: record.model,
        semconv.ATTR_VERDICT: record.verdict,
        semconv.ATTR_CONFIDENCE: record.confidence,
        semconv.ATTR_PROMPT_TOKENS: record.prompt_tokens,
        semconv.ATTR_LOCAL_TOKENS: record.local_tokens,
        semconv.ATTR_SERVED_TOKENS: record.served_tokens,
        semconv.ATTR_SERVABLE_TOKENS: record.servable_tokens,
        semconv.ATTR_EXPECTED_TOKENS: record.expected_tokens,
        semconv.ATTR_LOST_TOKENS: record.lost_tokens,
        semconv.ATTR_EVICTED_TOKENS: record.evicted_tokens,
        semconv.ATTR_LOST_GPU_SECONDS: record.lost_gpu_seconds,
    }
    if record.other_tokens:
        attributes[semconv.ATTR_OTHER_TOKENS] = record.other_tokens
    if record.computed_tokens is not None:
        attributes[semconv.ATTR_COMPUTED_TOKENS] = record.computed_tokens
    if record.cause is not None:
        attributes[semconv.ATTR_CAUSE] = record.cause
    if record.vetoing_group is not None:
        attributes[semconv.ATTR_VETOING_GROUP] = record.vetoing_group
    return attributes


def _lookup_attributes(lookup: Lookup) -> dict[str, AttributeValue]:
    asked = [group for group in lookup.groups if group.pass_number]
    return {
        semconv.ATTR_EXIT: lookup.exit,
        semconv.ATTR_ATTEMPT: lookup.attempt,
        semconv.ATTR_COUNT: lookup.count,
        semconv.ATTR_LOCAL_TOKENS: lookup.local_tokens,
        semconv.ATTR_GROUPS: [group.kv_group for group in asked],
        semconv.ATTR_GROUP_WIDTHS: [group.width for group in asked],
        semconv.ATTR_GROUP_HITS: [
            -1 if group.raw_hits is None else group.raw_hits for group in asked
        ],
        semconv.ATTR_GROUP_POPS: [group.popped for group in asked],
    }


def _job_attributes(job: records.Load | records.Store, field: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        semconv.ATTR_GROUPS: [group.kv_group for group in job.groups],
        semconv.ATTR_GROUP_CHUNKS: [getattr(group, field) for group in job.groups],
        semconv.ATTR_JOB_FAILED: job.failed,
    }
    if job.job_id is not None:
        attributes[semconv.ATTR_JOB_ID] = job.job_id
    if job.bytes is not None:
        attributes[semconv.ATTR_BYTES] = job.bytes
    return attributes
