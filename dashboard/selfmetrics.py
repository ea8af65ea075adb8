"""The dashboard's own metrics, in a registry of their own, served on ``/metrics``."""

from __future__ import annotations

from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvlens.telemetry import semconv

_INGEST_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class NotifyMetrics(NamedTuple):
    """Counters of the notifications to one kind of receiver, present from the start."""

    sent: Counter
    retried: Counter
    failed: Counter
    dropped: Counter

    @classmethod
    def of(cls, counter: Counter, target: str) -> NotifyMetrics:
        """Children of ``counter`` for ``target``."""
        return cls(*(counter.labels(target, outcome) for outcome in cls._fields))


class SelfMetrics:
    """One instance per application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=self.registry)

        self.records = counter(semconv.DASHBOARD_RECORDS, "Request records stored.")
        self.duplicates = counter(
            semconv.DASHBOARD_DUPLICATES, "Request records that were stored already."
        )
        self.rejected = counter(semconv.DASHBOARD_REJECTED, "Spans of kvlens that were rejected.")
        self.ignored = counter(semconv.DASHBOARD_IGNORED, "Spans that are not for the dashboard.")
        self.metric_exports = counter(
            semconv.DASHBOARD_METRIC_EXPORTS, "OTLP metric exports acknowledged and ignored."
        )
        self.backpressure = counter(
            semconv.DASHBOARD_BACKPRESSURE, "Exports answered with 429 because the queue was full."
        )
        self.deleted = counter(
            semconv.DASHBOARD_DELETED, "Request records deleted for their age or the store's size."
        )
        self.store_bytes = Gauge(
            semconv.DASHBOARD_STORE_BYTES,
            "Bytes that the embedded store uses; 0 for a ClickHouse.",
            registry=self.registry,
        )
        self.stream_dropped = counter(
            semconv.DASHBOARD_STREAM_DROPPED, "Request events dropped for slow stream clients."
        )
        self.errors = counter(
            semconv.DASHBOARD_ERRORS, "Errors of the dashboard that were contained."
        )
        self.scrapes = Counter(
            semconv.DASHBOARD_SCRAPES,
            "Scrapes by outcome: ok, failed, or dropped because the writer was busy.",
            (semconv.LABEL_OUTCOME,),
            registry=self.registry,
        )
        self.scrape_targets = Gauge(
            semconv.DASHBOARD_SCRAPE_TARGETS,
            "Scrape targets by state.",
            (semconv.LABEL_STATE,),
            registry=self.registry,
        )
        self.open_incidents = Gauge(
            semconv.DASHBOARD_OPEN_INCIDENTS, "Incidents open now.", registry=self.registry
        )
        self.stream_clients = Gauge(
            semconv.DASHBOARD_STREAM_CLIENTS, "Stream clients connected.", registry=self.registry
        )
        self.queue = Gauge(
            semconv.DASHBOARD_QUEUE, "Exports waiting to be stored.", registry=self.registry
        )
        notified = Counter(
            semconv.DASHBOARD_NOTIFICATIONS,
            "Notifications by outcome: sent, retried (an attempt failed), failed (given up) or "
            "dropped (the queue was full).",
            (semconv.LABEL_TARGET, semconv.LABEL_OUTCOME),
            registry=self.registry,
        )
        self.alertmanagers = NotifyMetrics.of(notified, "alertmanager")
        self.webhooks = NotifyMetrics.of(notified, "webhook")
        self.notify_waiting = Gauge(
            semconv.DASHBOARD_NOTIFY_WAITING, "Notifications to be sent.", registry=self.registry
        )
        self.ingest_seconds = Histogram(
            semconv.DASHBOARD_INGEST_SECONDS,
            "From the end of an export's body until it was durable.",
            buckets=_INGEST_BUCKETS,
            registry=self.registry,
        )
