"""ClickHouse over its HTTP interface: queries with bound parameters, inserts of JSON rows.

No driver: these two calls are all that the store needs, and httpx is here anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from kvlens.dashboard.store.base import StoreError
from kvlens.dashboard.store.clickhouse_target import ClickHouseTarget

_ATTEMPTS: Final = 4
_FIRST_PAUSE: Final = 0.1
_AGAIN: Final = frozenset({202, 209, 210, 242, 252, 285, 319, 425, 999})
"""Codes of ClickHouse that pass: network, too many queries or parts, replicas, Keeper."""
_AUTHENTICATION: Final = frozenset({192, 193, 194, 516})
_FORMAT: Final = "JSONCompactEachRow"
_SETTINGS: Final = {"output_format_json_quote_64bit_integers": 0}
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[Any])
Row = Mapping[str, object]


class ClickHouseError(StoreError):
    """ClickHouse refused; ``code`` is its own number, 0 when it did not answer."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Http:
    """One server. Thread-safe; connections are pooled and kept."""

    def __init__(self, target: ClickHouseTarget, timeout: float = 30.0) -> None:
        """``timeout`` is the longest wait for an answer, in seconds."""
        self._target = target
        self._client = httpx.Client(
            base_url=target.url,
            timeout=timeout,
            headers={"X-ClickHouse-User": target.user, "X-ClickHouse-Key": target.password},
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def query(self, sql: str, **params: str | float) -> list[list[Any]]:
        """Rows of a SELECT; ``{name:Type}`` in ``sql`` stands for ``params[name]``."""
        text = f"{sql} {_settings(_SETTINGS)} FORMAT {_FORMAT}"
        answer = self._post(text.encode(), {f"param_{k}": _param(v) for k, v in params.items()})
        return [_decoder.decode(line) for line in answer.splitlines()]

    def command(self, sql: str) -> None:
        """Run a statement that has no result."""
        self._post(sql.encode(), {})

    def insert(self, table: str, rows: Sequence[Row], **settings: str | int) -> None:
        """Insert rows of equal keys; may be repeated after a failure, so tables deduplicate."""
        if not rows:
            return
        columns = ", ".join(rows[0])
        sql = f"INSERT INTO {table} ({columns}) {_settings(settings)} FORMAT JSONEachRow"
        self._post(_encoder.encode_lines(rows), {"query": sql})

    def _post(self, body: bytes, params: dict[str, str]) -> bytes:
        # Without this, an error in the middle of a result comes with status 200.
        params = {"wait_end_of_query": "1", **params}
        for attempt in range(_ATTEMPTS):
            try:
                answer = self._client.post("/", params=params, content=body)
            except httpx.HTTPError as error:
                failure = self._unreachable(error)
                if isinstance(error, httpx.ReadTimeout):
                    break  # it works on it: do not ask for the same again
            else:
                if answer.is_success:
                    return answer.content
                failure = self._refused(answer)
                if failure.code not in _AGAIN and answer.status_code != 503:
                    break
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_FIRST_PAUSE * 2**attempt)
        raise failure

    def _unreachable(self, error: httpx.HTTPError) -> ClickHouseError:
        return ClickHouseError(
            f"{self._target} does not answer ({type(error).__name__}: {error}): check the address "
            "in --store, and that its HTTP port is open"
        )

    def _refused(self, answer: httpx.Response) -> ClickHouseError:
        number = answer.headers.get("x-clickhouse-exception-code", "0")
        code = int(number) if number.isdecimal() else 0
        text = answer.text.strip().partition("\n")[0][:500]
        if code in _AUTHENTICATION:
            text = f"user {self._target.user!r} or its password is wrong: {text}"
        return ClickHouseError(f"{self._target}: {text or f'HTTP {answer.status_code}'}", code)


def quoted(values: Iterable[str]) -> str:
    """A list of string literals for ``IN (…)``, never empty."""
    literals = ("'" + value.translate(_ESCAPES).replace("'", "\\'") + "'" for value in values)
    return ", ".join(literals) or "''"


def _param(value: str | float) -> str:
    return value.translate(_ESCAPES) if isinstance(value, str) else repr(value)


def _settings(settings: Mapping[str, str | int]) -> str:
    if not settings:
        return ""
    pairs = (
        f"{name} = {quoted([value]) if isinstance(value, str) else value}"
        for name, value in settings.items()
    )
    return f"SETTINGS {', '.join(pairs)}"
