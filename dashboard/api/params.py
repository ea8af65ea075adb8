"""Query parameters: unknown names and values are errors that say what is allowed."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Literal

from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvlens.dashboard.model.incident import RequestScope
from kvlens.dashboard.model.query import RequestQuery, Sort
from kvlens.dashboard.store.base import Store
from kvlens.telemetry.semconv import Cause, Verdict

MAX_LIMIT = 1000
_LATEST = 1e11
"""Unix seconds that no clock shows."""


def _time(value: object) -> object:
    """Unix seconds, from a number or RFC 3339."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError as error:
        raise ValueError("give Unix seconds or a time such as 2026-09-07T12:00:00Z") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


Time = Annotated[float, Field(ge=0, le=_LATEST, allow_inf_nan=False), BeforeValidator(_time)]
Text = Annotated[str, Field(min_length=1, max_length=512)]


class _Params(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RequestParams(_Params):
    """Filters of requests; all given ones must hold."""

    since: Time | None = Field(None, description="Finished at or after: Unix seconds or RFC 3339")
    until: Time | None = Field(None, description="Finished at or before")
    engine: Text | None = Field(None, description="Incarnation id or engine id")
    verdict: list[Verdict] = Field([], description="One or more verdicts")
    cause: Cause | None = Field(None, description="Cause of the loss")
    model: Text | None = Field(None, description="Model name")
    min_lost_tokens: int = Field(0, ge=0, lt=2**53, description="At least this many tokens lost")
    incident: Text | None = Field(None, description="Requests that an incident is about")
    sort: Sort = Field(
        "newest",
        description="By finish time, or by tokens, most first: then only requests that have any",
    )

    def query(self, store: Store, limit: int, cursor: str | None) -> RequestQuery:
        """Return the store's form; 404 if the incident does not exist."""
        bounds = _Bounds(self.since, self.until)
        engine, scope = self.engine, RequestScope(since=0, until=0)
        if self.incident is not None:
            incident = store.incident(self.incident)
            if incident is None:
                raise HTTPException(404, f"there is no incident {self.incident!r}")
            if engine not in (None, incident.incarnation_id, incident.engine_id):
                raise HTTPException(422, f"incident {self.incident!r} is of another engine")
            engine = incident.incarnation_id
            scope = incident.scope
            bounds.narrow(scope.since, scope.until)
        return RequestQuery(
            since=bounds.since,
            until=bounds.until,
            engine=engine,
            verdicts=self._verdicts(scope),
            cause=self._cause(scope),
            model=self.model,
            min_lost_tokens=max(self.min_lost_tokens, scope.min_lost_tokens),
            min_expected_tokens=scope.min_expected_tokens,
            max_served_tokens=scope.max_served_tokens,
            sort=self.sort,
            limit=limit,
            cursor=cursor,
        )

    def _verdicts(self, scope: RequestScope) -> tuple[str, ...]:
        """The wanted ones among the incident's; 422 where there can be none."""
        wanted = tuple(str(verdict) for verdict in self.verdict)
        both = tuple(verdict for verdict in wanted if verdict in scope.verdicts)
        if wanted and scope.verdicts and not both:
            raise HTTPException(422, f"verdict: the incident is about {', '.join(scope.verdicts)}")
        return both or wanted or scope.verdicts

    def _cause(self, scope: RequestScope) -> str | None:
        wanted = None if self.cause is None else str(self.cause)
        if wanted and scope.cause and wanted != scope.cause:
            raise HTTPException(422, f"cause: the incident is about {scope.cause}")
        return wanted or scope.cause


class RequestPageParams(RequestParams):
    """Filters and the page."""

    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Requests per page")
    cursor: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="next_cursor of the page before"
    )


class IncidentParams(_Params):
    """Filters of incidents."""

    state: Literal["open", "closed"] | None = Field(None, description="Only open or closed ones")
    engine: Text | None = Field(None, description="Incarnation id or engine id")
    limit: int | None = Field(
        None,
        ge=1,
        le=MAX_LIMIT,
        description="Newest so many; by default all open ones and the newest 200 closed ones",
    )


class AuditParams(_Params):
    """A page of the audit log."""

    before: Time | None = Field(None, description="Earlier than this: next_before of the page")
    limit: int = Field(200, ge=1, le=MAX_LIMIT, description="Entries per page")


class SeriesParams(_Params):
    """What a chart shows."""

    since: Time | None = Field(None, description="Start, default 24 h before until")
    until: Time | None = Field(None, description="End, default now")
    step: int = Field(60, ge=60, le=86_400, multiple_of=60, description="Seconds per point")
    engine: Text | None = Field(None, description="Incarnation id or engine id, default all")


class _Bounds:
    def __init__(self, since: float | None, until: float | None) -> None:
        self.since, self.until = since, until

    def narrow(self, since: float, until: float) -> None:
        self.since = since if self.since is None else max(since, self.since)
        self.until = until if self.until is None else min(until, self.until)
