"""Which servers are scraped: from settings, files, or Prometheus' HTTP service discovery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import msgspec
import yaml

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

    targets: list[str] | None
    labels: dict[str, Any] | None = None


_groups: Final = msgspec.json.Decoder(list[_Group])


def metrics_url(address: str) -> str:
    """Address of a server's ``/metrics``: host and port will do. Raises ``ValueError``."""
    text = address.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    spaced = any(map(str.isspace, text))
    if spaced or parts.scheme not in ("http", "https") or not parts.hostname:
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


def files(pattern: str) -> list[Path]:
    """The files that ``scrape_file`` names; raises :class:`TargetError` if there is none.

    As in Prometheus the last part of the path may hold ``*``.
    """
    path = Path(pattern).expanduser()
    found = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    if not found:
        raise TargetError(f"{pattern} matches no file")
    return found


def from_file(path: Path) -> list[Target]:
    """Targets in one file: JSON if it is called ``.json``, else YAML, of which JSON is a part.

    Raises :class:`TargetError`, and ``OSError`` if it cannot be read.
    """
    data = path.read_bytes()
    if path.suffix == ".json":
        return discovered(data, str(path))
    try:
        # None: nothing but comments.
        groups = msgspec.convert(yaml.safe_load(data) or [], list[_Group])
    except (yaml.YAMLError, msgspec.ValidationError, UnicodeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise TargetError(
            f"{path} is no list of targets ({why}): give YAML such as "
            f"`- targets: ['host:8000']`, or JSON in a file called .json"
        ) from error
    return _targets(groups, str(path))


def discovered(data: bytes | str, source: str) -> list[Target]:
    """Targets of Prometheus' service-discovery JSON; raises :class:`TargetError`."""
    try:
        groups = _groups.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TargetError(
            f'{source} is no list of targets ({error}): give JSON such as [{{"targets": '
            f'["host:8000"], "labels": {{}}}}]'
        ) from error
    return _targets(groups, source)


def _targets(groups: Iterable[_Group], source: str) -> list[Target]:
    found: list[Target] = []
    for group in groups:
        for address in group.targets or ():
            try:
                found.append(target_of(metrics_url(_full(address, group.labels or {}))))
            except ValueError as error:
                raise TargetError(f"{source}: {error}") from error
    if len(found) > _MAX_TARGETS:
        raise TargetError(f"{source} names over {_MAX_TARGETS:,} targets")
    return found


def _full(address: str, labels: Mapping[str, Any]) -> str:
    if "/" in address:
        raise ValueError(f"{address!r} is no target: give host:port, and the rest as labels")
    path = str(labels.get(_PATH, _DEFAULT_PATH))
    return f"{labels.get(_SCHEME, 'http')}://{address}{'' if path.startswith('/') else '/'}{path}"


def distinct(targets: Iterable[Target]) -> dict[str, Target]:
    """Targets by URL: one that several sources name is scraped once."""
    return {target.url: target for target in targets}
