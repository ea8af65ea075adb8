"""Connector settings: ``kv_connector_extra_config["kvlens"]`` and ``KVLENS_*``.

The configuration file wins over the environment, so that one engine can be
set apart from the machine's default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from kvlens.telemetry.environment import PREFIX
from kvlens.telemetry.flight.recorder import Mode
from kvlens.telemetry.semconv import Depth

SECTION = "kvlens"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and what is allowed."""


class LookupMode(str, Enum):
    """How the offload lookup is done."""

    STOCK = "stock"
    """vLLM's own code, observed."""
    CORRECTED = "corrected"
    """vLLM's own search with the corrections that this vLLM needs, made safe."""
    EXACT = "exact"
    """The largest boundary that can be served, by a search of kvlens' own."""


class Inner(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The connector that ``KVLensConnector`` watches."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """As in ``kv_connector``."""
    module_path: str | None = None
    """As in ``kv_connector_module_path``; None: one of vLLM's own."""
    extra_config: dict[str, Any] = {}
    """As in ``kv_connector_extra_config``."""


class ConnectorSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Everything that can be set for the connector."""

    lookup: LookupMode = LookupMode.CORRECTED
    """``corrected``, ``exact`` or ``stock``."""
    fallback_file: str | None = None
    """Path of a file that need not exist; while it does, vLLM's own lookup is used."""
    corrections: str | list[str] = "auto"
    """``auto`` (those that this vLLM needs), ``none``, or a list of names."""
    depth: Depth = Depth.GROUPS
    """``groups``, or ``interface``: stay outside vLLM's private modules, correct nothing."""
    inner: Inner | None = None
    """The connector that ``KVLensConnector`` watches: ``name``, and where it needs them
    ``module_path`` and ``extra_config`` (docs/connectors.md). Not from the environment."""
    telemetry: bool = True
    """Record lookups, stores and loads. Off: corrections only."""
    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP receiver, to which ``/v1/traces`` is appended, or
    ``grpc://HOST:PORT``. None: no spans, unless ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` (which
    vLLM's ``--otlp-traces-endpoint`` sets) or ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set."""
    otlp_metrics: bool = False
    """Send the numbers of ``/metrics`` to the same receiver as well."""
    otlp_headers: dict[str, str] = {}
    """Extra headers for the receiver; in the environment ``name=value``, with commas between."""
    ingest_token: str | None = None
    """Bearer token for the receiver (``kvlens serve --ingest-token``)."""
    sample_rate: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    """Share of unremarkable requests whose spans are sent; all others always are."""
    queue_size: Annotated[int, msgspec.Meta(ge=1024, le=10_000_000)] = 131_072
    """Facts waiting for the drain thread; beyond it the oldest are dropped and counted."""
    span_queue_size: Annotated[int, msgspec.Meta(ge=64, le=1_000_000)] = 4_096
    """Spans waiting for the receiver; beyond it the oldest are dropped and counted."""
    flight_recorder: str | None = None
    """Folder for recordings of requests (``kvlens inspect``, ``kvlens replay``); None: no files."""
    flight_recorder_mode: Mode = Mode.ALWAYS
    """``always``: every request. ``anomalies``: those that lost something, and their context."""
    flight_recorder_context: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 16
    """Unremarkable requests kept before and after each anomaly."""
    flight_recorder_max_bytes: Annotated[int, msgspec.Meta(ge=1_048_576)] = 268_435_456
    """Bound on all recordings in the folder; the oldest are deleted first."""


def load(
    extra_config: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ConnectorSettings:
    """Read settings; raises :class:`ConfigError` naming the setting.

    ``extra_config`` is vLLM's ``kv_connector_extra_config``.
    """
    section = extra_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'kv_connector_extra_config["{SECTION}"] must be an object of settings, '
            f"got {type(section).__name__}"
        )
    values = _from_environment(os.environ if environ is None else environ)
    values.update(section)
    try:
        settings = msgspec.convert(values, ConnectorSettings, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(ConnectorSettings.__struct_fields__)
        raise ConfigError(
            f"kvlens connector setting: {error} (set in kv_connector_extra_config "
            f'["{SECTION}"] or as {PREFIX}<NAME>; settings are: {known}; '
            f"lookup is one of: {', '.join(mode.value for mode in LookupMode)}; "
            f"depth is one of: {', '.join(depth.value for depth in Depth)}; "
            f"flight_recorder_mode is one of: {', '.join(mode.value for mode in Mode)})"
        ) from error
    if isinstance(settings.corrections, str) and settings.corrections not in ("auto", "none"):
        raise ConfigError(
            f"kvlens connector setting corrections: {settings.corrections!r} is neither "
            '"auto" nor "none" nor a list of names'
        )
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ConnectorSettings.__struct_fields__:
        text = environ.get(PREFIX + name.upper())
        if text is None or name == "inner":
            continue
        if name == "corrections" and text not in ("auto", "none"):
            values[name] = [part.strip() for part in text.split(",") if part.strip()]
        elif name in ("telemetry", "otlp_metrics"):
            values[name] = _switch(PREFIX + name.upper(), text)
        elif name == "otlp_headers":
            values[name] = _headers(PREFIX + name.upper(), text)
        else:
            values[name] = text
    return values


def _switch(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{variable}={text!r} is neither on nor off: set it to 1 or 0")


def _headers(variable: str, text: str) -> dict[str, str]:
    """Headers as in ``OTEL_EXPORTER_OTLP_HEADERS``: ``name=value``, with commas between."""
    headers = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, separator, value = part.partition("=")
        if not separator or not name.strip():
            # The value may be a secret: it is not repeated.
            raise ConfigError(f"{variable} wants name=value, with commas between")
        headers[name.strip()] = unquote(value.strip())
    return headers
