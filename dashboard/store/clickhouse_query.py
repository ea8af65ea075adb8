"""SQL for pages of requests in ClickHouse; by time they go along the table's own order.

A page is found in the narrow columns and its bodies are fetched afterwards, so that a
filter never reads a body it drops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvlens.dashboard.model.query import RequestQuery
from kvlens.dashboard.store.clickhouse_http import Http, quoted
from kvlens.dashboard.store.order import ORDERS, Key, Order

Params = dict[str, str | float]


def row_id(incarnation_id: str, internal_request_id: str) -> int:
    """What identifies a request: 63 bits that every dashboard computes alike."""
    text = f"{incarnation_id}\0{internal_request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def find(http: Http, table: str, query: RequestQuery) -> list[Key]:
    """Keys of one page, one more than the limit if there are more.

    Raises ``ValueError`` for a cursor that is not ours.
    """
    order = ORDERS[query.sort]
    after = None if query.cursor is None else order.position(query.cursor)
    conditions, params = _conditions(query)
    keys: list[Key] = []
    while (missing := query.limit + 1 - len(keys)) > 0:
        rows = _keys(http, table, order, conditions, params, after, missing)
        # Copies of a row that are not merged yet are neighbours in this order.
        keys += dict.fromkeys(rows)
        if len(rows) < missing:
            break
        after = rows[-1]
    return keys


def bodies(http: Http, table: str, keys: Sequence[Key]) -> list[str]:
    """JSON of the records with these keys, in their order."""
    if not keys:
        return []
    times = [time for *_, time, _ in keys]
    rows = http.query(
        f"SELECT finish_time, row_id, body FROM {table}"
        " WHERE finish_time BETWEEN {first:Float64} AND {last:Float64}"
        f" AND row_id IN ({', '.join(str(row) for *_, row in keys)})",
        first=min(times),
        last=max(times),
    )
    found = {(float(time), row): body for time, row, body in rows}
    return [found[time, row] for *_, time, row in keys if (time, row) in found]


def _keys(
    http: Http,
    table: str,
    order: Order,
    conditions: list[str],
    params: Params,
    after: Key | None,
    limit: int,
) -> list[Key]:
    conditions, params = list(conditions), dict(params)
    if order.value:
        conditions.append(f"{order.value} > 0")
    if after is not None:
        *value, params["at"], params["row"] = after
        rest = f"finish_time {order.beyond} {{at:Float64}} OR row_id {order.beyond} {{row:Int64}}"
        # Said once more for the bare column, whose index skips what lies before.
        within = f"finish_time {order.beyond}= {{at:Float64}}"
        if order.value:
            params["value"] = value[0]
            conditions.append(f"{order.value} {order.beyond}= {{value:Int64}}")
            within = f"({order.value} {order.beyond} {{value:Int64}} OR ({within} AND ({rest})))"
            conditions.append(within)
        else:
            conditions += [within, f"({rest})"]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = http.query(
        f"SELECT {', '.join(order.columns('row_id'))} FROM {table}{where}"
        f" ORDER BY {order.clause('row_id')} LIMIT {limit}",
        **params,
    )
    return [(*value, float(time), row) for *value, time, row in rows]


def _conditions(query: RequestQuery) -> tuple[list[str], Params]:
    conditions: list[str] = []
    params: Params = {}

    def add(condition: str, **values: str | float) -> None:
        conditions.append(condition)
        params.update(values)

    if query.since is not None:
        add("finish_time >= {since:Float64}", since=query.since)
    if query.until is not None:
        add("finish_time <= {until:Float64}", until=query.until)
    if query.engine is not None:
        add(
            "(incarnation_id = {engine:String} OR engine_id = {engine:String})", engine=query.engine
        )
    if query.model is not None:
        add("model = {model:String}", model=query.model)
    if query.verdicts:
        add(f"verdict IN ({quoted(query.verdicts)})")
    if query.cause:
        add("cause = {cause:String}", cause=query.cause)
    if query.min_lost_tokens > 0:
        add("lost_tokens >= {lost:Int64}", lost=query.min_lost_tokens)
    if query.min_expected_tokens > 0:
        add("expected_tokens >= {expected:Int64}", expected=query.min_expected_tokens)
    if query.max_served_tokens is not None:
        add("served_tokens <= {served:Int64}", served=query.max_served_tokens)
    return conditions, params


def incident_conditions(
    actions: str,
    state: str | None,
    engine: str | None,
    at: float | None,
    changed_since: float | None,
) -> tuple[str, Params]:
    """Filters of incidents as SQL and its parameters; ``actions`` is the audit log's table."""
    conditions, params = ["1 = 1"], Params()
    if state is not None:
        conditions.append("state = {state:String}")
        params["state"] = state
    if engine is not None:
        conditions.append(
            "(incarnation_id = {engine:String}"
            " OR JSONExtractString(body, 'engine_id') = {engine:String})"
        )
        params["engine"] = engine
    if at is not None:
        conditions.append(
            f"{float(at)!r} BETWEEN JSONExtractFloat(body, 'scope', 'since')"
            " AND JSONExtractFloat(body, 'scope', 'until')"
        )
    if changed_since is not None:
        since = repr(float(changed_since))
        conditions.append(
            f"(changed_at >= {since} OR id IN (SELECT incident_id FROM {actions}"
            f" WHERE time >= {since}))"
        )
    return " AND ".join(conditions), params
