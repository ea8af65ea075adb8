"""Settings of notifications: whom to tell, and in which words."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode
from typing_extensions import Self

from kvlens.dashboard.view import wording as text

_SHORTEST_SECRET: Final = 16
Urls = Annotated[tuple[str, ...], NoDecode]


class NotifySettings(BaseSettings):
    """Part of the dashboard's settings. Targets come from here only, never from the API."""

    public_url: str | None = None
    """Where people reach this dashboard, for links; default ``http://host:port``."""
    alertmanager_urls: Urls = ()
    """Every Alertmanager of a cluster, with commas between: ``http://am-0:9093,http://am-1:9093``."""
    alertmanager_token: SecretStr | None = None
    """Sent to them as ``Authorization: Bearer``."""
    alertmanager_resend_seconds: float = Field(60.0, ge=1)
    """Open incidents are sent again this often; after four times as long without, they resolve."""
    webhook_urls: Urls = ()
    """Receivers of signed JSON, with commas between."""
    webhook_secret: SecretStr | None = None
    """Key of the signature (Standard Webhooks); ``whsec_`` and base64, or any text."""
    notify_queue: int = Field(1000, ge=1, le=100_000)
    """Notifications kept for one receiver that does not answer; then the oldest are dropped."""
    notify_timeout_seconds: float = Field(5.0, gt=0, le=60)
    """Longest wait for one answer."""
    notify_summary_template: str = "{severity}: {kind} on {engine} ({model})"
    """First line of a message; the fields that it may name are in docs/notifications.md."""
    notify_description_template: str = "{summary}. Next: {next_step}"
    """The rest of it."""
    runbook_url_template: str | None = None
    """Your runbooks, e.g. ``https://wiki.example/kvlens/{kind}``; default: the dashboard's own."""

    @field_validator("alertmanager_urls", "webhook_urls", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        return value

    @field_validator("alertmanager_urls", "webhook_urls")
    @classmethod
    def _http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            check_http(url)
        return value

    @field_validator("public_url")
    @classmethod
    def _public(cls, value: str | None) -> str | None:
        return None if value is None else check_http(value).rstrip("/")

    @field_validator(
        "notify_summary_template", "notify_description_template", "runbook_url_template"
    )
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            text.check_template(value)
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < _SHORTEST_SECRET:
            raise ValueError(
                f"has at least {_SHORTEST_SECRET} characters: make one with `openssl rand -hex 32`"
            )
        return value

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.webhook_urls and self.webhook_secret is None:
            raise ValueError(
                "webhook_secret is required with webhook_urls, so that receivers can tell who "
                "sent a message: set KVLENS_WEBHOOK_SECRET"
            )
        return self


def check_http(url: str) -> str:
    """Return an http(s) URL with a host; raises ``ValueError`` for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give http:// or https:// URLs with a host")
    return url
