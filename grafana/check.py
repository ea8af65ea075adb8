"""Checks of expressions: PromQL that parses, and only names that somebody declares."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import promql_parser as promql

from grafana import recording
from grafana.promql import ENGINE_LABELS, TARGET_LABELS, VLLM
from kvlens.telemetry import semconv as s

_VARIABLES: Final = {
    "$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h", "$window": "5m",
}  # fmt: skip
_PROMETHEUS: Final = {
    "up": (),
    "process_start_time_seconds": (),
    "ALERTS": ("alertname", "alertstate", s.LABEL_SEVERITY, s.LABEL_INCIDENT_KIND,
               *ENGINE_LABELS, "form", "burn", "window"),
}  # fmt: skip
"""What Prometheus itself and every Python process provide."""
_OWN: Final[dict[str, tuple[str, ...]]] = {s.DASHBOARD_OPEN_INCIDENTS: ()}
"""The dashboard's own series that boards use."""


class CheckError(Exception):
    """An expression that cannot be right; the message names it."""


@cache
def declared() -> dict[str, frozenset[str]]:
    """Labels of every sample that may be queried, target's labels included."""
    known: dict[str, tuple[str, ...]] = {**_PROMETHEUS, **_OWN}
    for metric in s.METRICS:
        labels = (*ENGINE_LABELS, *metric.labels)
        if metric.type == "histogram":
            known |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
            known[f"{metric.name}_bucket"] = (*labels, "le")
        else:
            known[metric.exposed_name] = labels
    for name, item in VLLM.items():
        for prefix in ("vllm:", "vllm_"):
            known[prefix + name] = (*ENGINE_LABELS, *item["labels"])
    for name, labels in recording.recorded().items():
        known[name] = (*ENGINE_LABELS, *labels)
    return {name: frozenset((*TARGET_LABELS, *labels)) for name, labels in known.items()}


def check(expr: str) -> set[str]:
    """Names of the samples that ``expr`` asks for; raises :class:`CheckError`."""
    text = expr
    for variable, value in _VARIABLES.items():
        text = text.replace(variable, value)
    try:
        tree = promql.parse(text)
    except ValueError as error:
        raise CheckError(f"not PromQL: {error}: {expr}") from error
    return _walk(tree, expr)


def _walk(node: Any, expr: str) -> set[str]:
    if isinstance(node, promql.VectorSelector):
        return {_selector(node, expr)}
    if isinstance(node, promql.MatrixSelector):
        return {_selector(node.vector_selector, expr)}
    names: set[str] = set()
    for child in _children(node):
        names |= _walk(child, expr)
    used = _labels(node)
    allowed = {label for name in names for label in declared()[name]} | _made(node)
    if missing := used - allowed:
        raise CheckError(f"no such label in what is grouped or matched: {sorted(missing)}: {expr}")
    return names


def _made(node: Any) -> set[str]:
    """Labels that ``label_replace`` makes somewhere inside ``node``."""
    made = {label for child in _children(node) for label in _made(child)}
    if isinstance(node, promql.Call) and node.func.name == "label_replace":
        made.add(node.args[1].val)
    return made


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, promql.BinaryExpr):
        yield from (node.lhs, node.rhs)
    elif isinstance(node, promql.Call):
        yield from node.args
    elif isinstance(node, (promql.AggregateExpr, promql.ParenExpr, promql.UnaryExpr,
                           promql.SubqueryExpr)):  # fmt: skip
        yield node.expr


def _labels(node: Any) -> set[str]:
    """Labels that a node itself names."""
    modifier = getattr(node, "modifier", None)
    if modifier is None:
        return set()
    if isinstance(node, promql.AggregateExpr):
        return set(modifier.labels)
    matching = modifier.matching
    return set(matching.labels if matching else ()) | set(modifier.group_labels or ())


def _selector(selector: Any, expr: str) -> str:
    name = selector.name
    if name not in declared():
        raise CheckError(f"neither semconv nor vLLM nor a rule has {name}: {expr}")
    for matcher in selector.matchers.matchers:
        if matcher.name not in declared()[name]:
            raise CheckError(f"{name} has no label {matcher.name}: {expr}")
    return str(name)
