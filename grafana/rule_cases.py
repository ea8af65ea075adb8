"""What each alert must do with given series: the source of ``rules/tests/*.test.yml``.

A case lists *all* alerts that fire, so that none fires beside the one it is about.
Values are promtool's: ``0+10x5`` is 0, 10, … 50, one a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from grafana.alerts import alerts
from kvlens.telemetry import semconv as s
from kvlens.telemetry.semconv import Metric

TARGET: Final = {
    "job": "vllm", "instance": "gpu-1:8000", s.LABEL_ENGINE: "0", s.LABEL_MODEL: "m",
}  # fmt: skip
GROUP: Final = {s.LABEL_GROUP: "0", s.LABEL_KIND: "full_attention"}
UP: Final = {'up{instance="gpu-1:8000", job="vllm"}': "1x4400"}


@dataclass(frozen=True)
class Case:
    """``firing`` gives, per minute, how many alerts of each name fire."""

    name: str
    series: Mapping[str, str]
    firing: Mapping[int, Mapping[str, int]]
    summaries: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Per minute and alert, its summary after the name of the engine."""
    form: str = ""
    """Which rule of an alert with several the summaries are of."""

    def test(self, interval: str = "1m") -> dict[str, Any]:
        """As in promtool's file, with a value every ``interval``."""
        return {
            "name": self.name,
            "interval": interval,
            "input_series": [
                {"series": name, "values": values} for name, values in self.series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{name}"}}', "value": count}
                        for name, count in sorted(expected.items())
                    ],
                }
                for minute, expected in self.firing.items()
            ],
            "alert_rule_test": [
                _alert(minute, name, summary, self.form)
                for (minute, name), summary in self.summaries.items()
            ],
        }


def _alert(minute: int, name: str, summary: str, form: str) -> dict[str, Any]:
    rule = next(
        item.rule()
        for item in alerts()
        if item.name == name and item.labels.get("form", "") == form
    )
    where = f"{TARGET[s.LABEL_MODEL]}, engine 0 at {TARGET['instance']}"
    expected = {
        "exp_labels": {**TARGET, **rule["labels"]},
        "exp_annotations": {**rule["annotations"], "summary": f"{where}: {summary}"},
    }
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [expected]}


def kv(metric: Metric, values: str, *, part: str = "", **labels: str) -> dict[str, str]:
    """One series of kvlens."""
    given = {**TARGET, **(GROUP if metric.labels == s.GROUP_LABELS else {}), **labels}
    return {_series(f"{metric.name}{part}" if part else metric.exposed_name, given): values}


def vl(name: str, values: str, **labels: str) -> dict[str, str]:
    """One series of vLLM."""
    return {_series(f"vllm:{name}", {**TARGET, **labels}): values}


def _series(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def requests(verdict: s.Verdict, values: str) -> dict[str, str]:
    """Requests of one verdict."""
    return kv(s.REQUESTS, values, verdict=str(verdict))


def healthy(minutes: int = 60) -> dict[str, str]:
    """An engine with kvlens that serves everything, all closed children present."""
    flat = f"0x{minutes}"
    series = UP | requests(s.Verdict.FULL, f"0+4x{minutes}")
    for metric in (s.EXPECTED_TOKENS, s.SERVABLE_TOKENS, s.SERVED_TOKENS):
        series |= kv(metric, f"0+4096x{minutes}")
    for verdict in (s.Verdict.LOST, s.Verdict.UNSTORED, s.Verdict.STALLED, s.Verdict.EVICTED,
                    s.Verdict.UNSAFE):  # fmt: skip
        series |= requests(verdict, flat)
    for cause in (s.Cause.STORE_GAP, s.Cause.TAIL_HELD_BACK, s.Cause.CAPACITY):
        series |= kv(s.LOST_TOKENS, flat, cause=str(cause))
    for metric in (s.EVICTED_TOKENS, s.DROPPED_FACTS, s.DROPPED_SPANS, s.DROPPED_RECORDS,
                   s.OBSERVER_ERRORS, s.DEFERRED_REQUESTS):  # fmt: skip
        series |= kv(metric, flat)
    series |= kv(s.STORED_CHUNKS, f"0+40x{minutes}") | kv(s.REFUSED_CHUNKS, flat)
    for edge in ("10.0", "+Inf"):
        series |= kv(s.DEFERRAL_SECONDS, flat, part="_bucket", le=edge)
    return series


def stock(minutes: int = 60) -> dict[str, str]:
    """F16: a vLLM server that stores, is asked, evicts, and never loads."""
    flat = f"0x{minutes}"
    start = {'process_start_time_seconds{instance="gpu-1:8000", job="vllm"}': f"1x{minutes}"}
    return (
        UP | start
        | vl("kv_offload_store_bytes_total", f"0+60000000000x{minutes}")
        | vl("external_prefix_cache_queries_total", f"0+210000x{minutes}")
        | vl("external_prefix_cache_hits_total", flat)
        | vl("prefix_cache_queries_total", f"0+300000x{minutes}")
        | vl("prefix_cache_hits_total", f"0+90000x{minutes}")
        | vl("num_preemptions_total", flat)
        | vl("kv_cache_usage_perc", f"0.97x{minutes}")
    )  # fmt: skip
