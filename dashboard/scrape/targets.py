"""Which servers are scraped: from settings, a file, or Prometheus' HTTP service discovery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec

_SCHEME: Final = "__scheme__"
_PATH: Final = "__metrics_path__"
_MAX_TARGETS: Final = 10_000
_DEFAULT_PATH: Final = "/metrics"


class TargetError(ValueError):
    """A list of targets that cannot be used; the message says what to change."""


class Target(NamedTuple):
    """One server."""

    name: str
    """Host and port; with the path if that is not ``/metrics``."""
    url: str


class _Group(msgspec.Struct):
    """One entry of ``file_sd_configs`` or ``http_sd_configs``."""

    targets: list[str]
    labels: dict[str, str] = {}


_groups: Final = msgspec.json.Decoder(list[_Group])


def metrics_url(address: str) -> str:
    """Address of a server's ``/metrics``: host and port will do. Raises ``ValueError``."""
    text = address.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{address!r} is no address: give http://host:port")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if port == -1 or port == 0:
        raise ValueError(f"{address!r} has a port that cannot be: give http://host:port")
    if parts.username or parts.password or "@" in parts.netloc:
        raise ValueError(f"{parts.hostname}: credentials in addresses are not supported")
    path = parts.path if parts.path not in ("", "/") else _DEFAULT_PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def target_of(url: str) -> Target:
    """The target at a URL from :func:`metrics_url`."""
    parts = urlsplit(url)
    return Target(parts.netloc + ("" if parts.path == _DEFAULT_PATH else parts.path), url)


def discovered(data: bytes | str, source: str) -> list[Target]:
    """Targets of Prometheus' service-discovery JSON; raises :class:`TargetError`."""
    try:
        groups = _groups.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TargetError(
            f'{source} is no list of targets ({error}): give JSON such as [{{"targets": '
            f'["host:8000"], "labels": {{}}}}]'
        ) from error
    found: list[Target] = []
    for group in groups:
        for address in group.targets:
            try:
                found.append(target_of(metrics_url(_full(address, group.labels))))
            except ValueError as error:
                raise TargetError(f"{source}: {error}") from error
    if len(found) > _MAX_TARGETS:
        raise TargetError(f"{source} names over {_MAX_TARGETS:,} targets")
    return found


def _full(address: str, labels: Mapping[str, Any]) -> str:
    if "/" in address:
        raise ValueError(f"{address!r} is no target: give host:port, and the rest as labels")
    path = labels.get(_PATH, _DEFAULT_PATH)
    return f"{labels.get(_SCHEME, 'http')}://{address}{'' if path.startswith('/') else '/'}{path}"


def distinct(targets: Iterable[Target]) -> dict[str, Target]:
    """Targets by URL: one that several sources name is scraped once."""
    return {target.url: target for target in targets}
