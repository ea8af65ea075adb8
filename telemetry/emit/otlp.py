"""Which OTLP receiver to send to, by which protocol, and exporters for it.

``otlp_endpoint`` is the base URL of an OTLP/HTTP receiver, or ``grpc://host:4317``
(``grpcs://`` with TLS). Without it OpenTelemetry's own variables count, which
vLLM sets too: ``--otlp-traces-endpoint`` becomes
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` in the engine's process, and where no
protocol is named, an endpoint without a path is gRPC, as vLLM takes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

Signal = Literal["traces", "metrics"]
THREAD_NAME = "kvlens-otlp"
"""Threads whose name starts with it export; their exporters' own log lines are left out."""
TIMEOUT_SECONDS = 2
_HTTP, _GRPC = "http/protobuf", "grpc"
_GRPC_PORT = 4317
_EXPORTERS = "opentelemetry.exporter.otlp.proto"
_LOGGERS = (
    "http._common", "http.trace_exporter", "http.metric_exporter",
    "grpc.exporter", "grpc.trace_exporter", "grpc.metric_exporter",
)  # fmt: skip


class OtlpError(ValueError):
    """A receiver that cannot be used; the message names what to change."""


@dataclass(frozen=True)
class Receiver:
    """Where one signal goes."""

    endpoint: str
    """Full URL for HTTP, ``host:port`` for gRPC."""
    grpc: bool = False
    secure: bool = False
    """gRPC over TLS."""


def receiver(setting: str | None, signal: Signal = "traces") -> Receiver | None:
    """The receiver that ``otlp_endpoint`` names, else the environment; None if neither does.

    Raises :class:`OtlpError` for a URL that is none.
    """
    if setting:
        parts = urlsplit(setting)
        if parts.scheme in ("grpc", "grpcs") and parts.netloc:
            return Receiver(parts.netloc, grpc=True, secure=parts.scheme == "grpcs")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise OtlpError(
                f"otlp_endpoint: {setting!r} is no URL of an OTLP receiver: use "
                f"http://HOST:4318 or grpc://HOST:{_GRPC_PORT}"
            )
        base = setting.rstrip("/").removesuffix("/v1/traces").removesuffix("/v1/metrics")
        return Receiver(f"{base}/v1/{signal}")
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    named = own or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not named:
        return None
    parts = urlsplit(named if "://" in named else f"//{named}")
    protocol = os.environ.get(
        f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL",
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL"),
    )
    if protocol is None:
        bare = parts.path in ("", "/")
        protocol = _GRPC if bare and (own or parts.port == _GRPC_PORT) else _HTTP
    if protocol == _GRPC:
        return Receiver(parts.netloc, grpc=True, secure=parts.scheme in ("https", "grpcs"))
    return Receiver(own or f"{named.rstrip('/')}/v1/{signal}")


def with_token(headers: Mapping[str, str], token: str | None) -> dict[str, str]:
    """Headers of each export."""
    every = dict(headers)
    if token:
        every["authorization"] = f"Bearer {token}"
    return every


def span_exporter(to: Receiver, headers: Mapping[str, str]) -> SpanExporter:
    """Exporter of spans; raises :class:`OtlpError` without gRPC's package."""
    if not to.grpc:
        return OTLPSpanExporter(
            endpoint=to.endpoint, headers=dict(headers), timeout=TIMEOUT_SECONDS
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcSpanExporter,
        )
    except ImportError as error:
        raise _no_grpc(to) from error
    return GrpcSpanExporter(
        endpoint=to.endpoint, insecure=not to.secure, headers=tuple(headers.items()),
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip


def metric_exporter(to: Receiver, headers: Mapping[str, str]) -> MetricExporter:
    """Exporter of metrics; raises :class:`OtlpError` without gRPC's package."""
    if not to.grpc:
        return OTLPMetricExporter(
            endpoint=to.endpoint, headers=dict(headers), timeout=TIMEOUT_SECONDS
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
            OTLPMetricExporter as GrpcMetricExporter,
        )
    except ImportError as error:
        raise _no_grpc(to) from error
    return GrpcMetricExporter(
        endpoint=to.endpoint, insecure=not to.secure, headers=tuple(headers.items()),
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip


def _no_grpc(to: Receiver) -> OtlpError:
    return OtlpError(
        f"OTLP receiver {to.endpoint} speaks gRPC, for which the package "
        "opentelemetry-exporter-otlp-proto-grpc is needed: install it, or name an OTLP/HTTP "
        "endpoint in otlp_endpoint"
    )


def _not_ours(record: logging.LogRecord) -> bool:
    return not (record.threadName or "").startswith(THREAD_NAME)


def hush() -> None:
    """Leave out what exporters on threads of ours log about a receiver that is away.

    vLLM's exporters use the same loggers from other threads and keep their voice.
    """
    for name in _LOGGERS:
        logging.getLogger(f"{_EXPORTERS}.{name}").addFilter(_not_ours)
