"""SQL for pages of requests in ClickHouse: newest first, along the tables' own order."""

from __future__ import annotations

import hashlib

from kvlens.dashboard.store.base import RequestQuery
from kvlens.dashboard.store.clickhouse_http import quoted
from kvlens.dashboard.store.query import parse_cursor

Params = dict[str, str | float]


def row_id(incarnation_id: str, internal_request_id: str) -> int:
    """What identifies a request: 63 bits that every dashboard computes alike."""
    text = f"{incarnation_id}\0{internal_request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def page_sql(table: str, query: RequestQuery) -> tuple[str, Params]:
    """SQL giving ``(finish_time, row_id, body)``, one row more than the limit if there are more.

    Raises ``ValueError`` for a cursor that is not ours.
    """
    conditions, params = _conditions(query)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    # Copies of a row that are not merged yet are neighbours in this order.
    return (
        f"SELECT finish_time, row_id, body FROM {table}{where}"
        " ORDER BY finish_time DESC, row_id DESC LIMIT 1 BY finish_time, row_id"
        f" LIMIT {query.limit + 1}",
        params,
    )


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
    if query.cursor is not None:
        time, row = parse_cursor(query.cursor)
        add("finish_time <= {at:Float64}", at=time)
        add("(finish_time < {at:Float64} OR row_id < {row:Int64})", row=row)
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
