"""Settings of ``kvlens serve``: environment variables ``KVLENS_*`` or keywords."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as SourceError
from typing_extensions import Self

from kvlens.dashboard.model.thresholds import Thresholds
from kvlens.dashboard.notify_settings import NotifySettings
from kvlens.dashboard.scrape.targets import metrics_url
from kvlens.dashboard.store import clickhouse_target
from kvlens.telemetry import environment

MIN_TOKEN_LENGTH: Final = 16
_MIB: Final = 1024 * 1024
_DAY: Final = 86_400.0


def default_store() -> str:
    """Path of the store when none is given: the user's data directory."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(base) / "kvlens" / "kvlens.db")


class SettingsError(ValueError):
    """A setting that cannot be used; one line per field, each says how to fix it."""


class Settings(NotifySettings, Thresholds):
    """All settings, validated; thresholds included. Sizes are bytes, times seconds."""

    model_config = SettingsConfigDict(
        env_prefix="KVLENS_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback both tokens are required."""
    port: int = Field(8790, ge=0, le=65_535)
    """Port to listen on; 0 picks a free one."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Host names by which a loopback dashboard may be reached besides the usual ones."""
    store: str = Field(default_factory=default_store, repr=False)
    """Path of the SQLite file, ``sqlite:///path``, or ``clickhouse://user@host:8123/database``."""
    clickhouse_password: SecretStr | None = None
    """Password of the ClickHouse user, instead of in ``store``."""
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

    engine_gone_seconds: float = Field(300.0, ge=1)
    """An engine not heard of for so long is gone: each says every minute that it lives."""

    retention_seconds: float = Field(30 * _DAY, ge=60)
    """Requests, closed incidents and per-minute sums older than this are deleted."""
    retention_rollup_seconds: float = Field(365 * _DAY, ge=3600)
    """Hourly sums and the audit log are kept this long."""
    retention_max_bytes: int = Field(20 * 1024 * _MIB, ge=_MIB)
    """When the store grows beyond this, the oldest requests are deleted."""

    model_thresholds: dict[str, dict[str, float]] = {}
    """What single models change of the thresholds, as JSON: ``{"model": {"threshold": 5}}``."""

    scrape: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of vLLM servers whose ``/metrics`` are read, separated by commas."""
    scrape_file: str | None = None
    """More of them, in a JSON or YAML file as for Prometheus' ``file_sd_configs``, or in all that
    a pattern such as ``targets/*.yml`` matches; read anew every ``scrape_refresh_seconds``."""
    scrape_http_sd: str | None = None
    """More of them, from an address as for Prometheus' ``http_sd_configs``."""
    scrape_interval_seconds: float = Field(15.0, ge=1)
    """Time between two scrapes of a target."""
    scrape_timeout_seconds: float = Field(5.0, gt=0)
    """Longest wait for one page."""
    scrape_refresh_seconds: float = Field(60.0, ge=1)
    """Time between two looks at ``scrape_file`` and ``scrape_http_sd``."""
    scrape_max_bytes: int = Field(32 * _MIB, ge=1024)
    """Largest page taken."""
    scrape_concurrency: int = Field(16, ge=1, le=1000)
    """Pages fetched at the same time."""

    trace_url_template: str | None = None
    """Link to a trace, e.g. ``https://jaeger.example/trace/{trace_id}``."""

    _merged: dict[str, tuple[dict[str, float], Thresholds]] = PrivateAttr(default_factory=dict)

    @field_validator("port", mode="before")
    @classmethod
    def _port(cls, value: object) -> object:
        """Without the address by which Kubernetes tells pods of a Service named ``kvlens``."""
        if isinstance(value, str) and environment.is_service_link(value):
            return cls.model_fields["port"].default
        return value

    @field_validator("store")
    @classmethod
    def _store(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and scheme == clickhouse_target.SCHEME:
            clickhouse_target.parse(value)
            return value
        if separator and scheme != "sqlite":
            raise ValueError(
                f"scheme {scheme + '://'!r} is not known: give a file path, sqlite:///path or "
                f"{clickhouse_target.EXAMPLE}"
            )
        path = rest if separator else value
        if separator and not path.startswith("/"):
            raise ValueError("sqlite:// needs an absolute path: sqlite:///var/lib/kvlens.db")
        if not path or path.startswith(":") or path.endswith("/"):
            raise ValueError(f"{value!r} does not name a file: give a path such as ./kvlens.db")
        return str(Path(path).expanduser())

    @field_validator("allowed_hosts", "scrape", mode="before")
    @classmethod
    def _list(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(filter(None, map(str.strip, value.split(","))))

    @field_validator("scrape")
    @classmethod
    def _scrape(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(metrics_url, value))

    @field_validator("scrape_http_sd")
    @classmethod
    def _http_sd(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address: give one with http:// or https://")
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("credentials in addresses are not supported")
        return value

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

    @model_validator(mode="after")
    def _thresholds_of_models(self) -> Self:
        for model in self.model_thresholds:
            try:
                self.thresholds(model)
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(map(str, first["loc"]))
                why = first["msg"]
                if first["type"] == "extra_forbidden":
                    why = f"no such threshold; known are {', '.join(Thresholds.model_fields)}"
                raise ValueError(f"model_thresholds of {model!r}: {name}: {why}") from error
        return self

    def thresholds(self, model: str) -> Thresholds:
        """Thresholds for one model: the settings', with what it changes."""
        changes = self.model_thresholds.get(model)
        if not changes:
            return self
        # Detectors ask for each request; a copy of the settings brings changes of its own.
        known, merged = self._merged.get(model, (None, None))
        if merged is None or known is not changes:
            common = {name: getattr(self, name) for name in Thresholds.model_fields}
            merged = Thresholds.model_validate({**common, **changes})
            self._merged[model] = changes, merged
        return merged

    @property
    def clickhouse(self) -> clickhouse_target.ClickHouseTarget | None:
        """The ClickHouse to use; None for a SQLite file."""
        if not self.store.startswith(f"{clickhouse_target.SCHEME}://"):
            return None
        target = clickhouse_target.parse(self.store)
        if self.clickhouse_password is None:
            return target
        return replace(target, password=self.clickhouse_password.get_secret_value())

    @property
    def store_name(self) -> str:
        """``store`` to be shown: without a password."""
        return self.store if self.clickhouse is None else str(self.clickhouse)

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
    except SourceError as error:  # a variable of the environment that should be JSON
        field = str(error).partition('"')[2].partition('"')[0]
        raise SettingsError(
            f"{field} (KVLENS_{field.upper()}): it is not JSON ({error.__cause__}): see "
            "docs/configuration.md for an example"
        ) from error


def _explain(error: object) -> str:
    assert isinstance(error, dict)
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    field, *inner = map(str, error["loc"])
    if inner:
        message = f"{'.'.join(inner)}: {message}"
    if error["type"] == "extra_forbidden":
        return f"{field}: no such setting; known are {', '.join(Settings.model_fields)}"
    return f"{field} (KVLENS_{field.upper()}): {message}"
