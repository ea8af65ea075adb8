"""All detectors over a stream of observations; knows no store and no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, ParamSpec, TypeVar

from kvlens.dashboard.detect.base import Detector, Stateful
from kvlens.dashboard.detect.faults import (
    DeferralStall,
    LoadFailures,
    StoreFailures,
    TelemetryLost,
    UnsafeBoundary,
)
from kvlens.dashboard.detect.losses import CapacityThrash, LostHits, StoreGaps
from kvlens.dashboard.detect.scraped import Scraped
from kvlens.dashboard.detect.slow_reload import SlowReload
from kvlens.dashboard.detect.version_regression import VersionRegression
from kvlens.dashboard.detect.zero_hit import ZeroHit
from kvlens.dashboard.model.incident import Incident
from kvlens.dashboard.model.scrape import Scrape
from kvlens.dashboard.model.thresholds import ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord

_logger: Final = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def all_detectors(thresholds: ThresholdsFor = defaults) -> list[Detector]:
    """One of each kind, in the order in which they look at a request."""
    zero_hit = ZeroHit(thresholds)
    return [
        zero_hit,
        LostHits(thresholds, zero_hit.is_open),
        StoreGaps(thresholds),
        CapacityThrash(thresholds),
        DeferralStall(thresholds),
        SlowReload(thresholds),
        StoreFailures(thresholds),
        LoadFailures(thresholds),
        UnsafeBoundary(thresholds),
        TelemetryLost(thresholds),
        VersionRegression(thresholds),
    ]


class Observed(NamedTuple):
    """A request, finished or (``waiting``) still in flight."""

    record: RequestRecord
    waiting: bool = False

    @property
    def order(self) -> tuple[float, str]:
        """Observations are taken in the order of their times."""
        return self.record.finish_time, self.record.internal_request_id


class Panel:
    """Feeds detectors; collects incidents that changed until they are taken."""

    def __init__(
        self,
        detectors: Sequence[Detector],
        scraped: Scraped | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """``failed`` counts errors of detectors, which are contained."""
        self._detectors = detectors
        self._scraped = scraped
        self._failed = failed
        self.changed: dict[str, Incident] = {}
        """Incidents by id, each as it stands now; whoever takes them clears it."""

    def parts(self) -> Iterator[Stateful]:
        """Everything with a state worth keeping."""
        yield from self._detectors
        if self._scraped is not None:
            yield self._scraped

    def load(self, kind: str, key: str, state: bytes) -> None:
        """Take up one kept state; states of detectors that are not here are left alone."""
        for part in self.parts():
            if str(part.kind) == kind:
                self._guard(None, part.load, key, state)

    def observe(
        self, observations: Iterable[Observed], engines: Callable[[str], EngineInfo | None]
    ) -> None:
        """Take requests that became known together; ``engines`` knows an incarnation's engine."""
        for record, waiting in sorted(observations, key=lambda item: item.order):
            engine = engines(record.incarnation_id)
            if engine is None:
                continue
            for detector in self._detectors:
                call = detector.deferred if waiting else detector.observe
                self._note(self._guard(None, call, record, engine))

    def end(self, incarnation_id: str, at: float) -> None:
        """An incarnation ended."""
        for detector in self._detectors:
            self._note(self._guard(None, detector.end, incarnation_id, at))

    def scrape(self, scrape: Scrape, models_told: Callable[[str], bool]) -> None:
        """Take one scrape; ``models_told`` says whether a model's engines send records."""
        if self._scraped is not None:
            for incident in self._guard([], self._scraped.take, scrape, models_told):
                self._note(incident)

    def _note(self, incident: Incident | None) -> None:
        if incident is not None:
            self.changed[incident.id] = incident

    def _guard(self, otherwise: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Contain a detector's error: records are safe and the other detectors go on."""
        try:
            return call(*args, **kwargs)
        except Exception:
            self._failed()
            _logger.exception("a detector failed; its state may miss a request")
            return otherwise
