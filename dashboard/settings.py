"""Settings of ``kvlens serve``: environment variables ``KVLENS_*`` or keywords."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from typing_extensions import Self

from kvlens.dashboard.notify.settings import NotifySettings

MIN_TOKEN_LENGTH: Final = 16
_MIB: Final = 1024 * 1024
_DAY: Final = 86_400.0


def default_store() -> str:
    """Path of the store when none is given: the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(base) / "kvlens" / "kvlens.db")


class SettingsError(ValueError):
    """A setting that cannot be used; one line per field, each says how to fix it."""


class Settings(NotifySettings):
    """All settings, validated. Sizes are bytes, times seconds."""

    model_config = SettingsConfigDict(
        env_prefix="KVLENS_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback both tokens are required."""
    port: int = Field(8790, ge=0, le=65_535)
    """Port to listen on; 0 picks a free one."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names by which a loopback dashboard may be reached besides the usual ones."""
    store: str = Field(default_factory=default_store)
    """Path of the SQLite file, or the same as ``sqlite:///path``."""
    read_token: SecretStr | None = None
    """Needed for pages and API: ``Authorization: Bearer``, or Basic with it as password."""
    ingest_token: SecretStr | None = None
    """Needed for ``POST /v1/…``: ``Authorization: Bearer``."""

    max_body_bytes: int = Field(16 * _MIB, ge=1024)
    """Largest accepted request body, as sent."""
    max_decompressed_bytes: int = Field(32 * _MIB, ge=1024)
    """Largest accepted body after gzip."""
    max_record_bytes: int = Field(64 * 1024, ge=1024)
    """Largest accepted JSON attribute."""
    queue_batches: int = Field(32, ge=1, le=10_000)
    """Exports that may wait to be stored before new ones get 429."""
    stream_queue: int = Field(200, ge=1)
    """Request events kept for one slow stream client; older ones are dropped."""

    retention_seconds: float = Field(30 * _DAY, ge=60)
    """Requests, closed incidents and per-minute sums older than this are deleted."""
    retention_rollup_seconds: float = Field(365 * _DAY, ge=3600)
    """Hourly sums and the audit log are kept this long."""
    retention_max_bytes: int = Field(20 * 1024 * _MIB, ge=_MIB)
    """When the store grows beyond this, the oldest requests are deleted."""

    eligible_min_tokens: int = Field(256, ge=1)
    """A request counts for ``zero_hit`` from this many expected tokens on (or one chunk)."""
    zero_hit_requests: int = Field(3, ge=2)
    """Shortest run of eligible requests with nothing served that can be an incident."""
    zero_hit_window_seconds: float = Field(1800.0, gt=0)
    """Requests of the run are at most this much older than its newest."""
    zero_hit_accident: float = Field(1e-6, gt=0, lt=1)
    """The run must be less probable than this at the engine's own earlier rate."""
    zero_hit_recovery: int = Field(10, ge=1)
    """Eligible requests served in a row that close the incident."""

    trace_url_template: str | None = None
    """Link to a trace, e.g. ``https://jaeger.example/trace/{trace_id}``."""

    @field_validator("store")
    @classmethod
    def _store(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and scheme != "sqlite":
            raise ValueError(
                f"scheme {scheme + '://'!r} is not known: give a file path or sqlite:///path"
            )
        path = rest if separator else value
        if separator and not path.startswith("/"):
            raise ValueError("sqlite:// needs an absolute path: sqlite:///var/lib/kvlens.db")
        if not path or path.startswith(":") or path.endswith("/"):
            raise ValueError(f"{value!r} does not name a file: give a path such as ./kvlens.db")
        return str(Path(path).expanduser())

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _hosts(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @field_validator("read_token", "ingest_token")
    @classmethod
    def _token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        text = value.get_secret_value()
        if len(text) < MIN_TOKEN_LENGTH or not text.isascii() or not text.isprintable():
            raise ValueError(
                f"a token has at least {MIN_TOKEN_LENGTH} printable ASCII characters: "
                "make one with `openssl rand -hex 32`"
            )
        return value

    @field_validator("trace_url_template")
    @classmethod
    def _trace_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or value.count("{trace_id}") != 1:
            raise ValueError("give an http(s) URL that contains {trace_id} once")
        return value

    @model_validator(mode="after")
    def _tokens_beyond_loopback(self) -> Self:
        if not self.loopback:
            for name in ("read_token", "ingest_token"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name} is required to listen on {self.host}, which others can reach: "
                        f"set KVLENS_{name.upper()} or listen on 127.0.0.1"
                    )
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the dashboard."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def trace_url(self, trace_id: str) -> str | None:
        """Link to a trace (hex id), or None without a template or an id."""
        if self.trace_url_template is None or not trace_id:
            return None
        return self.trace_url_template.replace("{trace_id}", trace_id)


def load_settings(**given: object) -> Settings:
    """Read settings from ``given`` (None = not given) and the environment.

    Raises :class:`SettingsError`, whose text names each field that is wrong.
    """
    try:
        return Settings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("\n".join(map(_explain, error.errors()))) from error


def _explain(error: object) -> str:
    assert isinstance(error, dict)
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    field = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{field}: no such setting; known are {', '.join(Settings.model_fields)}"
    return f"{field} (KVLENS_{field.upper()}): {message}"
