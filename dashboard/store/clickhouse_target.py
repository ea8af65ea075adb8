"""Which ClickHouse: the address that ``--store`` and ``KVLENS_STORE`` take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEME: Final = "clickhouse"
EXAMPLE: Final = "clickhouse://user:password@host:8123/kvlens"
_PORT, _SECURE_PORT = 8123, 8443
_DATABASE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_CLUSTER: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_YES: Final = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class ClickHouseTarget:
    """One server (any node of a cluster, or a proxy before them) and what to use there."""

    url: str
    """``http://host:port`` or ``https://host:port``."""
    database: str
    user: str = "default"
    password: str = field(default="", repr=False)
    cluster: str | None = None
    """Tables are sharded and replicated over this cluster of the server's configuration."""

    def __str__(self) -> str:
        """The address without the password."""
        suffix = f"?cluster={self.cluster}" if self.cluster else ""
        return f"{SCHEME}://{self.url.partition('://')[2]}/{self.database}{suffix}"


def parse(text: str) -> ClickHouseTarget:
    """Read ``clickhouse://user:password@host:port/database?cluster=NAME&secure=1``.

    Raises ``ValueError`` that says what is wrong, never with the password in it.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not an address: give one such as {EXAMPLE}") from error
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    secure = options.pop("secure", "0")
    cluster = options.pop("cluster", None)
    database = parts.path.strip("/")
    if parts.scheme != SCHEME or not parts.hostname or parts.fragment:
        raise ValueError(f"not an address: give one such as {EXAMPLE}")
    if options:
        raise ValueError(f"{', '.join(sorted(options))}: known options are cluster and secure")
    if secure not in _YES:
        raise ValueError("secure is 1 (https) or 0 (http)")
    if not _DATABASE.match(database):
        raise ValueError(f"name a database of letters, digits and _: {EXAMPLE}")
    if cluster is not None and not _CLUSTER.match(cluster):
        raise ValueError("cluster is a name of letters, digits and _.- from remote_servers")
    scheme, default = ("https", _SECURE_PORT) if _YES[secure] else ("http", _PORT)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return ClickHouseTarget(
        url=f"{scheme}://{host}:{port or default}",
        database=database,
        user=unquote(parts.username or "default"),
        password=unquote(parts.password or ""),
        cluster=cluster,
    )
