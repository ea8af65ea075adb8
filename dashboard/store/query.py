"""SQL for one page of requests.

Each query names its index: pages come from an index in their own order, so a page
costs its own length, however many requests the store holds. Only where an order by
tokens meets a filter that few rows pass does it cost more; the store gives up in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store.order import ORDERS
from kvlens.telemetry.semconv import QUIET_VERDICTS

Params = list[object]
_QUIET: Final = frozenset(map(str, QUIET_VERDICTS))
_MERGE: Final = 64
"""Up to this many engines are read one by one and merged, beyond it by time."""


def page_sql(query: RequestQuery, engines: Sequence[int] | None) -> tuple[str, Params]:
    """SQL giving ``(*key, body)``, one row more than the limit if there are more.

    ``engines`` are the only engine numbers wanted, None = all. Raises
    ``ValueError`` for a cursor that is not of this order.
    """
    order = ORDERS[query.sort]
    conditions, params = _conditions(query)
    index = _index(query)
    if engines is None:
        selects = [_select(query, index, conditions)]
        all_params = [*params, query.limit + 1]
    elif order.value or len(engines) > _MERGE:
        marks = ",".join("?" * len(engines))
        selects = [_select(query, index, [*conditions, f"engine_no IN ({marks})"])]
        all_params = [*params, *engines, query.limit + 1]
    else:
        index = "anomalous_by_engine" if _anomalous(query) else "requests_by_engine"
        selects = [_select(query, index, [*conditions, "engine_no = ?"])] * len(engines)
        all_params = [value for no in engines for value in (*params, no, query.limit + 1)]
    sql = (
        f"SELECT {', '.join(order.columns('seq'))}, body FROM ({' UNION ALL '.join(selects)})"
        f" JOIN bodies USING (seq) ORDER BY {order.clause('seq')} LIMIT ?"
    )
    return sql, [*all_params, query.limit + 1]


def _select(query: RequestQuery, index: str, conditions: list[str]) -> str:
    order = ORDERS[query.sort]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return (
        f"SELECT * FROM (SELECT {', '.join(order.columns('seq'))} FROM requests"
        f" INDEXED BY {index}{where} ORDER BY {order.clause('seq')} LIMIT ?)"
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
    value = ORDERS[query.sort].value
    if value:
        return f"requests_by_{value}"
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

    order = ORDERS[query.sort]
    if order.value:
        add(f"{order.value} > 0")
    elif _anomalous(query):
        add("anomalous = 1")
    if query.since is not None:
        add("finish_time >= ?", query.since)
    if query.until is not None:
        add("finish_time <= ?", query.until)
    if query.cursor is not None:
        position = order.position(query.cursor)
        names = ", ".join(order.columns("seq"))
        marks = ", ".join("?" * len(position))
        add(f"({names}) {order.beyond} ({marks})", *position)
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
