"""One engine, group by group: where hits die."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.panels import ENGINE, GROUP, RATE, Panel, Query, board
from grafana.promql import kvlens, quantile
from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Metric

NAME = "group {{kv_group}} {{group_kind}}"


def _rate(metric: Metric, by: str = "kv_group, group_kind") -> str:
    where = GROUP if metric.labels == s.GROUP_LABELS else ENGINE
    return f"sum by ({by}) (rate({kvlens(metric, **where)}[{RATE}]))"


def _groups(metric: Metric, prefix: str = "") -> Query:
    return Query(_rate(metric), f"{prefix}{NAME}")


def _heat(metric: Metric) -> Query:
    selector = kvlens(metric, **ENGINE).replace(metric.exposed_name, f"{metric.name}_bucket", 1)
    return Query(f"sum by (le) (increase({selector}[{RATE}]))", "{{le}}", metric.exemplars)


def _median(metric: Metric) -> Query:
    return Query(quantile(metric, 0.5, RATE, by="kv_group, group_kind", **GROUP), NAME)


def build() -> Dashboard:
    """The board."""
    direction = "{{direction}}"
    rows = {
        "Requests": [
            Panel("Expected, servable, served", "Apart: lost at the store, lost at the lookup.",
                  tuple(Query(f"sum(rate({kvlens(metric, **ENGINE)}[{RATE}]))", name)
                        for metric, name in ((s.EXPECTED_TOKENS, "expected"),
                                             (s.SERVABLE_TOKENS, "servable"),
                                             (s.SERVED_TOKENS, "served")))),
            Panel("Lost tokens by cause", "What to change.",
                  (Query(_rate(s.LOST_TOKENS, "cause"), "{{cause}}"),), stacked=True),
            Panel("Lookups by exit", "`vetoed` and `popped_out` are where hits die.",
                  (Query(_rate(s.LOOKUPS, "exit"), "{{exit}}"),), stacked=True),
        ],
        "Lookups, by group": [
            Panel("Lookup width, median", "Chunks asked for.", (_median(s.LOOKUP_WIDTH),), width=6),
            Panel("Found before the pop, median", "Chunks found.", (_median(s.LOOKUP_HITS),),
                  width=6),
            Panel("Pops", "Volatile last chunks that drafter groups give up.", (_groups(s.POPS),),
                  width=6),
            Panel("Vetoes", "Lookups that this group brought to zero.", (_groups(s.VETOES),),
                  width=6),
        ],
        "Chunks, by group": [
            Panel("Stored against served", "Stores without reads are what a zero hit looks like.",
                  (_groups(s.STORED_CHUNKS, "stored "), _groups(s.SERVED_CHUNKS, "served "))),
            Panel("Held back and refused", "Not offered at the end of requests; refused.",
                  (_groups(s.HELD_BACK_CHUNKS, "held back "),
                   _groups(s.REFUSED_CHUNKS, "refused "))),
            Panel("Evicted and come back", "Evicted for room; stored again after that.",
                  (_groups(s.EVICTED_CHUNKS, "evicted "), _groups(s.GHOST_CHUNKS, "back "))),
            Panel("Resident", "What the tier holds (vLLM's gauge shows transfers in flight).",
                  (Query(f"sum by (kv_group, group_kind) ({kvlens(s.RESIDENT_CHUNKS, **GROUP)})",
                         NAME),
                   Query(f"sum({kvlens(s.CAPACITY_CHUNKS, **ENGINE)})", "capacity")), width=12),
            Panel("Groups", "KV-cache groups of the engine.",
                  (Query(kvlens(s.GROUP_INFO, **GROUP)),), "table", width=12,
                  columns={"kv_group": "Group", "group_kind": "Kind", "instance": "Instance",
                           "engine": "Engine", "model_name": "Model"}),
        ],
        "Time": [
            Panel("Reload latency", "Allocation until the load was seen finished; dots lead to "
                  "traces where the exposition carries exemplars.",
                  (_heat(s.RELOAD_LATENCY),), "heatmap", "s", width=12),
            Panel("Deferred lookups", "How long requests waited for an answer of the tier.",
                  (_heat(s.DEFERRAL_SECONDS),), "heatmap", "s", width=12),
            Panel("Transfer time, 95th percentile", "On the device, by direction.",
                  (Query(quantile(s.TRANSFER_SECONDS, 0.95, RATE, by="direction", **ENGINE),
                         direction, True),), unit="s"),
            Panel("Lookup time, 99th percentile", "On the scheduler thread.",
                  (Query(quantile(s.LOOKUP_SECONDS, 0.99, RATE, by="instance, engine", **ENGINE),
                         "{{instance}} · {{engine}}", True),), unit="s"),
            Panel("Waiting now", "Requests whose lookup is deferred.",
                  (Query(f"sum({kvlens(s.DEFERRED_REQUESTS, **ENGINE)})", "deferred"),)),
        ],
        "Capacity": [
            Panel("Hit ratio against capacity", "Share of chunk uses that a pool of so many times "
                  "the capacity would serve.",
                  (Query(f"avg by (capacity) ({kvlens(s.HIT_RATIO, **ENGINE)})", "{{capacity}}"),),
                  unit="percentunit", maximum=1, width=12),
            Panel("Prefill rate", "Prompt tokens that this engine computes per second of a step.",
                  (Query(f"avg by (instance, engine) ({kvlens(s.PREFILL_RATE, **ENGINE)})",
                         "{{instance}} · {{engine}}"),), width=6),
            Panel("Own lookup given up", "1 while vLLM's own lookup is used instead.",
                  (Query(f"max by (reason) ({kvlens(s.LOOKUP_FALLBACK, **ENGINE)})",
                         "{{reason}}"),),
                  width=6),
        ],
    }  # fmt: skip
    return board(
        "engine", "kvlens: one engine", "KV offload of one engine, group by group.", rows,
        of=s.EXPECTED_TOKENS.exposed_name, grouped=True,
    )  # fmt: skip
