"""All engines at a glance: what is served, what is lost, and where to look."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana import recording
from grafana.panels import ENGINE, RATE, UIDS, Panel, Query, board
from grafana.promql import kvlens, quantile
from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Metric

TO_ENGINE = {
    "This engine": f"/d/{UIDS['engine']}?${{__url_time_range}}&var-instance="
    "${__field.labels.instance}&var-engine=${__field.labels.engine}"
}


def _total(metric: Metric, window: str = "$__range", **labels: str) -> str:
    return f"sum(increase({kvlens(metric, **ENGINE, **labels)}[{window}]))"


def _by(label: str, metric: Metric, **labels: str) -> Query:
    rate = f"rate({kvlens(metric, **ENGINE, **labels)}[{RATE}])"
    return Query(f"sum by ({label}) ({rate})", f"{{{{{label}}}}}")


def _per_engine(metric: Metric) -> str:
    return f"sum by (instance, engine) (rate({kvlens(metric, **ENGINE)}[{RATE}]))"


def build() -> Dashboard:
    """The board."""
    per_engine = "{{instance}} · {{engine}}"
    loads = Query(
        quantile(s.RELOAD_LATENCY, 0.95, RATE, by="instance, engine", **ENGINE), per_engine, True
    )
    versions = {
        "model_name": "Model", "instance": "Instance", "engine": "Engine", "version": "kvlens",
        "vllm_version": "vLLM", "lookup": "Lookup", "drafter_groups": "Drafter groups",
        "corrections": "Corrections", "layout": "Groups",
    }  # fmt: skip
    unserved = kvlens_unserved()
    rows = {
        "Now": [
            Panel("Served", "Tokens loaded from the tier instead of computed.",
                  (Query(_total(s.SERVED_TOKENS)),), "stat", width=4),
            Panel("Lost", "Tokens computed again that should have been served.",
                  (Query(_total(s.LOST_TOKENS)),), "stat", width=4, red_from=1),
            Panel("Evicted before reuse", "Tokens computed again because the tier is too small.",
                  (Query(_total(s.EVICTED_TOKENS)),), "stat", width=4),
            Panel("Device time lost", "What computing lost tokens took.",
                  (Query(_total(s.LOST_GPU_SECONDS)),), "stat", "s", width=4, red_from=60),
            Panel("Unsafe requests", "KV data of another position was served or stored.",
                  (Query(_total(s.REQUESTS, verdict=str(s.Verdict.UNSAFE))),), "stat", width=4,
                  red_from=1),
            Panel("Waiting for the tier", "Requests whose lookup is deferred now.",
                  (Query(f"sum({kvlens(s.DEFERRED_REQUESTS, **ENGINE)})"),), "stat", width=4,
                  red_from=1),
        ],
        "Served and lost": [
            Panel("Where prompt tokens come from", "local: GPU cache; offload: tier; computed.",
                  (_by(s.LABEL_SOURCE, s.PROMPT_TOKENS),), stacked=True),
            Panel("Lost tokens by cause", "The smallest change that would have served them.",
                  (_by(s.LABEL_CAUSE, s.LOST_TOKENS),), stacked=True),
            Panel("Requests by verdict", "What became of each request's reusable tokens.",
                  (_by(s.LABEL_VERDICT, s.REQUESTS),), stacked=True, unit="reqps"),
            Panel("Served of servable, by engine", "0 means that everything stored is for nothing.",
                  (Query(f"{_per_engine(s.SERVED_TOKENS)} / ({_per_engine(s.SERVABLE_TOKENS)} > 0)",
                         per_engine),), unit="percentunit", width=12, maximum=1, links=TO_ENGINE),
            Panel("Budget burnt, by engine", "Servable tokens not served; 1 % is allowed.",
                  (Query(unserved.format("5m"), per_engine + " 5 min"),
                   Query(unserved.format("1h"), per_engine + " 1 h")),
                  unit="percentunit", width=12, maximum=1, links=TO_ENGINE),
        ],
        "The tier": [
            Panel("Fill", "Chunks resident of those that fit.",
                  (Query(f"sum by (instance, engine) ({kvlens(s.RESIDENT_CHUNKS, **ENGINE)}) / "
                         f"sum by (instance, engine) ({kvlens(s.CAPACITY_CHUNKS, **ENGINE)})",
                         per_engine),), unit="percentunit", maximum=1, links=TO_ENGINE),
            Panel("Reload latency, 95th percentile", "Allocation until the load was seen finished.",
                  (loads,), unit="s", links=TO_ENGINE),
            Panel("Hit ratio against capacity", "Share of chunk uses that a pool of so many times "
                  "the capacity would serve.",
                  (Query(f"avg by (capacity) ({kvlens(s.HIT_RATIO, **ENGINE)})", "{{capacity}}"),),
                  unit="percentunit", maximum=1),
        ],
        "Engines": [
            Panel("Versions and configuration", "One line per engine.",
                  (Query(kvlens(s.INFO, **ENGINE)),), "table", width=24, columns=versions),
            Panel("kvlens' own losses", "Facts, spans and records dropped, errors contained.",
                  tuple(Query(_per_engine(metric), f"{metric.name.removeprefix('kvlens_')} "
                              + per_engine)
                        for metric in (s.DROPPED_FACTS, s.DROPPED_SPANS, s.DROPPED_RECORDS,
                                       s.OBSERVER_ERRORS)), width=12),
            Panel("Numbers that do not add up", "Anything but 0 is a defect of kvlens.",
                  (_by(s.LABEL_IDENTITY, s.IDENTITY_VIOLATIONS),), width=12),
        ],
    }  # fmt: skip
    return board(
        "fleet", "kvlens: fleet", "KV offload of all engines: served, lost, why.", rows,
        of=s.EXPECTED_TOKENS.exposed_name,
    )  # fmt: skip


def kvlens_unserved() -> str:
    """The recorded share of servable tokens not served, with a place for the window."""
    matchers = ", ".join(f'{name}=~"{value}"' for name, value in ENGINE.items())
    return recording.unserved("{}") + "{{" + matchers + "}}"
