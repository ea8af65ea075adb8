"""What takes numbers and finished records, as those who give them see it."""

from __future__ import annotations

from typing import Protocol

from kvlens.telemetry.records import RequestRecord
from kvlens.telemetry.semconv import Metric

Labels = tuple[str, ...]


class MetricSink(Protocol):
    """Takes numbers; called on the drain thread only."""

    def count(self, metric: Metric, value: float = 1, labels: Labels = ()) -> None:
        """Add to a counter."""

    def observe(
        self, metric: Metric, value: float, labels: Labels = (), trace_id: str = ""
    ) -> None:
        """Add one sample to a histogram; ``trace_id`` (32 hex digits) becomes its exemplar."""

    def gauge(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        """Set a gauge."""


class RecordSink(Protocol):
    """Takes records; called on the drain thread only."""

    @property
    def sampled(self) -> bool:
        """Whether unremarkable requests reach it by the sample rate only; else it gets all."""

    @property
    def dropped(self) -> int:
        """Spans or records dropped so far because they could not be passed on in time."""

    @property
    def dropped_metric(self) -> Metric:
        """The counter for them."""

    def request(self, record: RequestRecord) -> None:
        """Take the record of a finished request."""

    def deferral(self, record: RequestRecord) -> None:
        """Take an in-flight record of a request that waits for a deferred lookup."""

    def close(self) -> None:
        """Send what is left, within a bounded time."""
