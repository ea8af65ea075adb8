"""SQL for one page of requests.

Each query names its index: pages come newest first from a time-ordered index,
so a page costs its own length, however many requests the store holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlens.dashboard.store.base import RequestQuery
from kvlens.telemetry.semconv import QUIET_VERDICTS

Params = list[object]
_QUIET: Final = frozenset(map(str, QUIET_VERDICTS))
_MERGE: Final = 64
"""Up to this many engines are read one by one and merged, beyond it by time."""


def page_sql(query: RequestQuery, engines: Sequence[int] | None) -> tuple[str, Params]:
    """SQL giving ``(seq, finish_time, body)``, one row more than the limit if there are more.

    ``engines`` are the only engine numbers wanted, None = all. Raises
    ``ValueError`` for a cursor that :func:`cursor` did not make.
    """
    conditions, params = _conditions(query)
    index = _index(query)
    if engines is None:
        selects = [_select(index, conditions)]
        all_params = [*params, query.limit + 1]
    elif len(engines) > _MERGE:
        marks = ",".join("?" * len(engines))
        selects = [_select(index, [*conditions, f"engine_no IN ({marks})"])]
        all_params = [*params, *engines, query.limit + 1]
    else:
        index = "anomalous_by_engine" if _anomalous(query) else "requests_by_engine"
        selects = [_select(index, [*conditions, "engine_no = ?"])] * len(engines)
        all_params = [value for no in engines for value in (*params, no, query.limit + 1)]
    sql = (
        f"SELECT seq, finish_time, body FROM ({' UNION ALL '.join(selects)})"
        " JOIN bodies USING (seq) ORDER BY finish_time DESC, seq DESC LIMIT ?"
    )
    return sql, [*all_params, query.limit + 1]


def cursor(finish_time: float, seq: int) -> str:
    """Opaque position after one row."""
    return f"{finish_time.hex()}_{seq}"


def parse_cursor(text: str) -> tuple[float, int]:
    """Read what :func:`cursor` made; raises ``ValueError`` for anything else."""
    time, _, seq = text.partition("_")
    try:
        position = float.fromhex(time), int(seq)
        if abs(position[1]) >= 2**63:
            raise ValueError(seq)
    except (ValueError, OverflowError) as error:
        raise ValueError("not a cursor of this API: pass next_cursor of a page as it is") from error
    return position


def _select(index: str, conditions: list[str]) -> str:
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return (
        f"SELECT * FROM (SELECT seq, finish_time FROM requests INDEXED BY {index}{where}"
        " ORDER BY finish_time DESC, seq DESC LIMIT ?)"
    )


def _anomalous(query: RequestQuery) -> bool:
    """Whether only anomalous rows can match, so that their partial index may be used.

    What is anomalous is decided by ``append``; each condition here implies it.
    """
    return bool(
        query.cause
        or query.min_lost_tokens > 0
        or (query.min_expected_tokens > 0 and query.max_served_tokens == 0)
        or (query.verdicts and _QUIET.isdisjoint(query.verdicts))
    )


def _index(query: RequestQuery) -> str:
    if query.cause:
        return "requests_by_cause"
    if len(query.verdicts) == 1:
        return "requests_by_verdict"
    return "anomalous_by_time" if _anomalous(query) else "requests_by_time"


def _conditions(query: RequestQuery) -> tuple[list[str], Params]:
    conditions: list[str] = []
    params: Params = []

    def add(condition: str, *values: object) -> None:
        conditions.append(condition)
        params.extend(values)

    if _anomalous(query):
        add("anomalous = 1")
    if query.since is not None:
        add("finish_time >= ?", query.since)
    if query.until is not None:
        add("finish_time <= ?", query.until)
    if query.cursor is not None:
        add("(finish_time, seq) < (?, ?)", *parse_cursor(query.cursor))
    if len(query.verdicts) == 1:
        add("verdict = ?", *query.verdicts)
    elif query.verdicts:
        add(f"verdict IN ({','.join('?' * len(query.verdicts))})", *query.verdicts)
    if query.cause:
        add("cause = ?", query.cause)
    if query.min_lost_tokens > 0:
        add("lost_tokens >= ?", query.min_lost_tokens)
    if query.min_expected_tokens > 0:
        add("expected_tokens >= ?", query.min_expected_tokens)
    if query.max_served_tokens is not None:
        add("served_tokens <= ?", query.max_served_tokens)
    return conditions, params
