"""The dashboard's own metrics are those that docs/metrics.md lists."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from kvlens.dashboard.selfmetrics import SelfMetrics
from kvlens.telemetry import catalog

TYPES = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def test_names_types_and_labels_are_as_documented() -> None:
    registry = SelfMetrics().registry
    made = {
        (type(collector), collector._name, collector._labelnames)
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
    }
    assert made == {(TYPES[item.type], item.name, item.labels) for item in catalog.DASHBOARD}
