"""Who may ask, and what a browser may do with the answer. Pure ASGI: streams pass through."""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Final

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlens.dashboard.settings import Settings

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_INGEST_PREFIX: Final = "/v1/"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_ACTION_BYTES: Final = 64 * 1024
"""Largest body of a request that is not OTLP."""
_LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class Security:
    """Checks the token and, on loopback, the host name; adds security headers."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._read = _secret(settings.read_token)
        self._ingest = _secret(settings.ingest_token)
        # A web page that rebinds its own name to 127.0.0.1 sends that name.
        self._hosts = (
            _LOOPBACK_NAMES.union(settings.allowed_hosts, (settings.host,))
            if settings.loopback
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers) or _unsafe(scope, headers)
        await (refusal or self._app)(scope, receive, secured)

    def _refusal(self, path: str, headers: Headers) -> PlainTextResponse | None:
        host = _host_name(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            return PlainTextResponse(
                f"host name {host!r} is not allowed: add it to KVLENS_ALLOWED_HOSTS\n", 421
            )
        if path in _OPEN_PATHS:
            return None
        ingest = path.startswith(_INGEST_PREFIX)
        wanted = self._ingest if ingest else self._read
        if wanted is None or hmac.compare_digest(_credential(headers, basic=not ingest), wanted):
            return None
        name = "KVLENS_INGEST_TOKEN" if ingest else "KVLENS_READ_TOKEN"
        # Basic lets a browser ask for the token, and EventSource send it.
        scheme = "Bearer" if ingest else 'Basic realm="kvlens: token as password"'
        return PlainTextResponse(
            f"a valid token is needed: Authorization: Bearer <{name} of the dashboard>\n",
            401,
            {"WWW-Authenticate": scheme},
        )


def _unsafe(scope: Scope, headers: Headers) -> PlainTextResponse | None:
    """Refuse to act for another site's page, and bodies that no action needs.

    A browser adds a Basic token, and reaches loopback, for any page that asks.
    """
    if scope["method"] in _SAFE_METHODS or scope["path"].startswith(_INGEST_PREFIX):
        return None
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    foreign = site not in (None, "same-origin", "none")
    if foreign or (origin is not None and origin.partition("://")[2] != headers.get("host")):
        return PlainTextResponse("only the dashboard's own pages may act in a browser\n", 403)
    length = headers.get("content-length", "")
    if not length.isdecimal():
        return PlainTextResponse("send the body with a Content-Length\n", 411)
    if int(length) > MAX_ACTION_BYTES:
        return PlainTextResponse(f"the body is larger than {MAX_ACTION_BYTES:,} bytes\n", 413)
    return None


def user_name(headers: Headers) -> str:
    """User name of Basic authentication, empty without; at most 128 printable characters."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        name = base64.b64decode(value.strip(), validate=True).partition(b":")[0].decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return "".join(filter(str.isprintable, name)).strip()[:128]


def _secret(token: SecretStr | None) -> bytes | None:
    return None if token is None else token.get_secret_value().encode()


def _credential(headers: Headers, *, basic: bool) -> bytes:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode()
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _host_name(host: str) -> str:
    """Host without port; IPv6 without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
