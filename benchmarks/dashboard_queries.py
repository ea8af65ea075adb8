"""Latency of every page and API query over a full store, as a browser would see it."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import httpx
from dashboard_fill import ENGINES, INCIDENTS
from dashboard_process import Watched, quantile

from kvlens.dashboard.store.order import ORDERS

BUDGET_MS = 200.0
Draw = Callable[[random.Random], str]


class Latency(NamedTuple):
    """Milliseconds of one kind of query."""

    name: str
    cpu: float
    """Processor time of the server, median: what is left when nobody else is at work."""
    first: float
    p50: float
    p95: float
    worst: float

    @property
    def kept(self) -> bool:
        """Whether it is within the budget."""
        return self.p95 <= BUDGET_MS


def _engine(draw: random.Random) -> str:
    return f"inc-{draw.randrange(ENGINES):02d}"


def _incident(draw: random.Random) -> str:
    return f"zero_hit-{draw.randrange(INCIDENTS):012x}"


def queries(idents: list[str], cursors: list[str]) -> dict[str, Draw]:
    """Every page and API query; what it asks for is drawn anew each time."""
    return {
        "page: overview": lambda d: "/",
        "page: overview, 7 days": lambda d: "/?range=7d",
        "page: engine": lambda d: f"/engines/{_engine(d)}",
        "page: incidents": lambda d: "/incidents",
        "page: incident": lambda d: f"/incidents/{_incident(d)}",
        "page: requests": lambda d: "/requests",
        "page: requests, lost, one engine": lambda d: f"/requests?verdict=lost&engine={_engine(d)}",
        "page: requests, most lost": lambda d: "/requests?sort=lost",
        "page: requests, most served, one engine, 6 hours": lambda d: (
            f"/requests?sort=served&range=6h&engine={_engine(d)}"
        ),
        "page: compare": lambda d: "/compare",
        "page: cost": lambda d: "/cost",
        "page: cost, 6 hours": lambda d: "/cost?range=6h",
        "page: request": lambda d: f"/requests/{d.choice(idents)}",
        "API: engines": lambda d: "/api/v1/engines",
        "API: engine": lambda d: f"/api/v1/engines/{_engine(d)}",
        "API: incidents": lambda d: "/api/v1/incidents",
        "API: incident": lambda d: f"/api/v1/incidents/{_incident(d)}",
        "API: audit": lambda d: "/api/v1/audit",
        "API: requests, newest 100": lambda d: "/api/v1/requests",
        "API: requests, from anywhere": lambda d: f"/api/v1/requests?cursor={d.choice(cursors)}",
        "API: requests by engine": lambda d: f"/api/v1/requests?engine={_engine(d)}",
        "API: requests by model": lambda d: f"/api/v1/requests?model=model-{d.choice('abcd')}",
        "API: requests by verdict": lambda d: (
            f"/api/v1/requests?verdict={d.choice(['lost', 'partial', 'cold', 'full'])}"
        ),
        "API: requests by cause": lambda d: "/api/v1/requests?cause=drafter_fallback",
        "API: requests by tokens lost": lambda d: "/api/v1/requests?min_lost_tokens=4000",
        "API: requests by cause, one model": lambda d: (
            f"/api/v1/requests?cause=drafter_fallback&model=model-{d.choice('abcd')}"
        ),
        "API: requests, oldest 100": lambda d: "/api/v1/requests?sort=oldest",
        "API: requests, most expected, one model": lambda d: (
            f"/api/v1/requests?sort=expected&model=model-{d.choice('abcd')}"
        ),
        "API: requests, most expected, by verdict": lambda d: (
            f"/api/v1/requests?sort=expected&verdict={d.choice(['lost', 'partial', 'full'])}"
        ),
        "API: requests, most lost, by cause, one engine": lambda d: (
            f"/api/v1/requests?sort=lost&cause=drafter_fallback&engine={_engine(d)}"
        ),
        "API: requests of an incident": lambda d: f"/api/v1/requests?incident={_incident(d)}",
        "API: request": lambda d: f"/api/v1/requests/{d.choice(idents)}",
        "API: series, 24 h by 60 s": lambda d: "/api/v1/series?step=60",
        "API: series, 24 h by 300 s": lambda d: "/api/v1/series?step=300",
        "API: series, 24 h by 60 s, one engine": lambda d: (
            f"/api/v1/series?step=60&engine={_engine(d)}"
        ),
        "API: self-metrics": lambda d: "/metrics",
    }


def sample(path: Path, count: int = 400) -> tuple[list[str], list[str]]:
    """Ids and page cursors of requests from all over the store."""
    draw = random.Random(2)
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    last = db.execute("SELECT max(seq) FROM requests").fetchone()[0]
    rows = [
        db.execute(
            "SELECT request_id, finish_time, seq FROM requests WHERE seq = ?",
            (draw.randint(1, last),),
        ).fetchone()
        for _ in range(count)
    ]
    db.close()
    return [row[0] for row in rows], [quote(ORDERS["newest"].cursor(row[1:])) for row in rows]


def measure(server: Watched, path: Path, repeat: int) -> list[Latency]:
    """Ask each query ``repeat`` times, in rounds, so that none has the cache to itself."""
    draw = random.Random(3)
    kinds = queries(*sample(path))
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(repeat):
            for name, make in kinds.items():
                target = make(draw)
                cpu, began = server.cpu_seconds(), time.perf_counter()
                client.get(target).raise_for_status()
                taken[name].append((time.perf_counter() - began) * 1e3)
                spent[name].append((server.cpu_seconds() - cpu) * 1e3)
    return [
        Latency(
            name,
            quantile(spent[name], 0.5),
            ms[0],
            quantile(ms, 0.5),
            quantile(ms, 0.95),
            max(ms),
        )
        for name, ms in taken.items()
    ]
