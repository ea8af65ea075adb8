"""The filters of the requests page: from its address to a store query and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, cast
from urllib.parse import urlencode

from pydantic import TypeAdapter

from kvlens.dashboard.api.params import Time
from kvlens.dashboard.model.query import RequestQuery, Sort
from kvlens.dashboard.web.charts import RANGES
from kvlens.telemetry.semconv import Cause, Verdict

PAGE_SIZE = 50
ANY_TIME = "all"
NEWEST = "newest"
SORTS: Final[dict[Sort, str]] = {
    "newest": "newest first",
    "oldest": "oldest first",
    "lost": "most tokens lost first",
    "served": "most tokens served first",
    "expected": "most tokens expected first",
}
_WHOLE = re.compile("[0-9]{1,15}")
_TIME: TypeAdapter[float] = TypeAdapter(Time)
_FIELDS = (
    "engine",
    "verdict",
    "cause",
    "model",
    "range",
    "since",
    "until",
    "min_lost",
    "sort",
    "cursor",
)


@dataclass(frozen=True)
class RequestForm:
    """What the form says; empty text means no filter. ``errors`` name what was ignored.

    ``since`` and ``until`` are times as the API takes them, for links from elsewhere (Grafana);
    a named ``range`` wins over them.
    """

    engine: str = ""
    verdict: str = ""
    cause: str = ""
    model: str = ""
    range: str = ANY_TIME
    since: str = ""
    until: str = ""
    min_lost: str = ""
    sort: str = NEWEST
    cursor: str = ""
    errors: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> RequestForm:
        """Read query parameters; a value that makes no sense is dropped and named."""
        given = {name: params.get(name, "").strip() for name in _FIELDS}
        errors = []
        for name, allowed in (
            ("verdict", [str(verdict) for verdict in Verdict]),
            ("cause", [str(cause) for cause in Cause]),
            ("range", [ANY_TIME, *RANGES]),
            ("sort", list(SORTS)),
        ):
            if given[name] and given[name] not in allowed:
                errors.append(f"{name} is one of {', '.join(allowed)}; got {given[name]!r}")
                given[name] = ""
        if given["min_lost"] and not _WHOLE.fullmatch(given["min_lost"]):
            errors.append(f"min_lost is a whole number of tokens; got {given['min_lost']!r}")
            given["min_lost"] = ""
        given["range"] = given["range"] or ANY_TIME
        given["sort"] = given["sort"] or NEWEST
        for name in ("since", "until"):
            try:
                _moment(given[name])
            except ValueError:
                errors.append(
                    f"{name} is Unix seconds or a time such as 2026-09-07T12:00:00Z; got "
                    f"{given[name]!r}"
                )
                given[name] = ""
        return cls(**given, errors=tuple(errors))

    def query(self, now: float) -> RequestQuery:
        """The store query; ``now`` (Unix seconds) ends the time range."""
        named = self.range != ANY_TIME
        return RequestQuery(
            since=now - RANGES[self.range] if named else _moment(self.since),
            until=None if named else _moment(self.until),
            engine=self.engine or None,
            verdicts=(self.verdict,) if self.verdict else (),
            cause=self.cause or None,
            model=self.model or None,
            min_lost_tokens=int(self.min_lost or 0),
            sort=cast("Sort", self.sort),
            limit=PAGE_SIZE,
            cursor=self.cursor or None,
        )

    @property
    def active(self) -> bool:
        """Whether anything narrows the list."""
        return self != RequestForm(cursor=self.cursor, sort=self.sort)

    @property
    def cleared(self) -> str:
        """Address of the whole list in the same order."""
        return RequestForm(sort=self.sort).link()

    def sorted_by(self, sort: str) -> str:
        """Address of the first page of the same requests in another order."""
        return replace(self, sort=sort).link()

    def link(self, cursor: str | None = None) -> str:
        """Address of the same list, from ``cursor`` on."""
        values = {name: getattr(self, name) for name in _FIELDS if name != "cursor"}
        values["range"] = "" if self.range == ANY_TIME else self.range
        values["sort"] = "" if self.sort == NEWEST else self.sort
        pairs = {name: value for name, value in values.items() if value}
        if cursor:
            pairs["cursor"] = cursor
        return "/requests" + (f"?{urlencode(pairs)}" if pairs else "")

    def export(self, form: str, now: float) -> str:
        """Address of all requests that match, as ``csv`` or ``jsonl``."""
        query = self.query(now)
        pairs = {
            "format": form,
            "since": query.since,
            "until": query.until,
            "engine": query.engine,
            "verdict": self.verdict,
            "cause": query.cause,
            "model": query.model,
            "min_lost_tokens": query.min_lost_tokens,
            "sort": "" if self.sort == NEWEST else self.sort,
        }
        given = {name: value for name, value in pairs.items() if value not in (None, "", 0)}
        return f"/api/v1/export?{urlencode(given)}"


def _moment(text: str) -> float | None:
    """Unix seconds; None of nothing, ValueError of what is no time."""
    return _TIME.validate_python(text) if text else None
