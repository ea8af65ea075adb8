"""``version_regression``: a version or configuration serves a smaller share than the last good one.

The share is served of expected tokens, each request weighted by its expected
tokens and by 1 / sampling probability. Two shares differ when the difference
exceeds what Hoeffding's inequality allows by chance. It is looked at each time
the newer version's number of requests has doubled, and the k-th look may err
with probability ``error / (k (k + 1))``: however long a version runs, a false
alarm has a probability of at most ``error`` for requests that are independent.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import msgspec

from kvlens.dashboard.detect.base import Keyed
from kvlens.dashboard.detect.eligible import due, least_tokens
from kvlens.dashboard.detect.tally import Subject, Tally, incident
from kvlens.dashboard.model.incident import ENGINE_GONE, RECOVERED, Incident
from kvlens.dashboard.model.thresholds import Thresholds, ThresholdsFor, defaults
from kvlens.telemetry.records import EngineInfo, RequestRecord, encode
from kvlens.telemetry.semconv import IncidentKind, Severity

_VARIANTS: Final = 16
"""Versions remembered per model; the one longest unseen goes first."""


class Variant(msgspec.Struct):
    """One version and configuration of a model's engines."""

    key: str
    name: str
    first_start: float
    last_seen: float = 0.0
    weight: float = 0.0
    squares: float = 0.0
    """Sum of squared weights."""
    served: float = 0.0
    """Sum of weights times share served."""
    looks: int = 0
    running: list[str] = []
    """Incarnations that have not ended."""
    engines: list[str] = []
    good: Variant | None = None
    """What it fell behind, as that stood when the incident opened."""
    open: Tally | None = None
    opened_at: float = 0.0
    incarnation_id: str = ""

    @property
    def requests(self) -> float:
        """How many equally weighted requests would be as sure."""
        return self.weight**2 / self.squares if self.squares else 0.0

    @property
    def share(self) -> float:
        """Served of expected tokens."""
        return self.served / self.weight if self.weight else 0.0


class VersionState(msgspec.Struct):
    """One model."""

    variants: list[Variant] = []


class VersionRegression(Keyed[VersionState]):
    """See :class:`kvlens.dashboard.detect.base.Detector`; its state is kept by model."""

    kind = IncidentKind.VERSION_REGRESSION

    def __init__(self, thresholds: ThresholdsFor = defaults) -> None:
        super().__init__(VersionState, thresholds)
        self._keys: dict[str, tuple[EngineInfo, str]] = {}

    def observe(self, record: RequestRecord, engine: EngineInfo) -> Incident | None:
        """Take one finished request; return the incident if it opened, changed or closed."""
        thresholds = self._thresholds(engine.model)
        if not due(record, least_tokens(engine, thresholds)):
            return None
        state = self._touch(engine.model) or self._states.setdefault(engine.model, VersionState())
        variant = _variant(state, engine, self._key(engine))
        variant.last_seen = max(variant.last_seen, record.finish_time)
        for known, ident in (
            (variant.running, engine.incarnation_id),
            (variant.engines, engine.engine_id),
        ):
            if ident not in known:
                known.append(ident)
        weight = record.expected_tokens / record.sampling_probability
        variant.weight += weight
        variant.squares += weight**2
        variant.served += weight * min(1.0, record.served_tokens / record.expected_tokens)
        if variant.open is not None and record.served_tokens < record.expected_tokens:
            variant.open.add(record)
        due_at = thresholds.version_regression_requests * 2**variant.looks
        if variant.requests < due_at:
            return None
        variant.looks += 1
        return self._look(record, engine, state, variant, thresholds)

    def _key(self, engine: EngineInfo) -> str:
        known, key = self._keys.get(engine.incarnation_id, (None, ""))
        if known is not engine:
            key = configuration(engine)
            self._keys[engine.incarnation_id] = engine, key
        return key

    def end(self, incarnation_id: str, at: float) -> Incident | None:
        """Close the incident of a version whose last engine ended."""
        self._keys.pop(incarnation_id, None)
        for model, state in self._states.items():
            for variant in state.variants:
                if incarnation_id not in variant.running:
                    continue
                self.dirty.add(model)
                variant.running.remove(incarnation_id)
                if variant.open is not None and not variant.running:
                    return _close(model, variant, at, ENGINE_GONE)
        return None

    def _look(
        self,
        record: RequestRecord,
        engine: EngineInfo,
        state: VersionState,
        variant: Variant,
        thresholds: Thresholds,
    ) -> Incident | None:
        if variant.open is not None:
            assert variant.good is not None
            if variant.good.share - variant.share <= thresholds.version_regression_drop:
                return _close(engine.model, variant, record.finish_time, RECOVERED)
            return _incident(engine.model, variant, variant.open)
        good = _last_good(state, variant, thresholds)
        if good is None:
            return None
        error = thresholds.version_regression_error / (variant.looks * (variant.looks + 1))
        doubt = _deviation(good, error / 2) + _deviation(variant, error / 2)
        if good.share - variant.share - doubt <= thresholds.version_regression_drop:
            return None
        variant.good = msgspec.structs.replace(good, good=None, open=None)
        variant.open, variant.opened_at = Tally(), record.finish_time
        variant.incarnation_id = record.incarnation_id
        variant.open.add(record)
        return _incident(engine.model, variant, variant.open)


def _deviation(variant: Variant, error: float) -> float:
    """By how much its share may be off, one-sided, but for a probability of ``error``."""
    return math.sqrt(math.log(1 / error) / (2 * variant.requests))


def _last_good(state: VersionState, variant: Variant, thresholds: Thresholds) -> Variant | None:
    """The newest earlier version that has not fallen behind itself."""
    earlier = [
        other
        for other in state.variants
        if other.first_start < variant.first_start
        and other.open is None
        and other.requests >= thresholds.version_regression_requests
    ]
    return max(earlier, key=lambda other: other.first_start, default=None)


def _variant(state: VersionState, engine: EngineInfo, key: str) -> Variant:
    for variant in state.variants:
        if variant.key == key:
            return variant
    if len(state.variants) >= _VARIANTS:
        closed = [variant for variant in state.variants if variant.open is None]
        if closed:
            state.variants.remove(min(closed, key=lambda variant: variant.last_seen))
    active = ",".join(item.name for item in engine.corrections if item.state == "active")
    name = f"vLLM {engine.vllm_version}, kvlens {engine.kvlens_version}, lookup {engine.lookup}"
    variant = Variant(key, f"{name}, corrections {active or 'none'}", engine.started_at)
    state.variants.append(variant)
    return variant


def configuration(engine: EngineInfo) -> str:
    """What makes engines comparable: all that is configured, nothing that identifies one."""
    plain = msgspec.structs.replace(
        engine, engine_id="", incarnation_id="", started_at=0.0, host="", dp_rank=0
    )
    return hashlib.sha256(encode(plain).encode()).hexdigest()[:16]


def _close(model: str, variant: Variant, at: float, reason: str) -> Incident:
    assert variant.open is not None
    closed = _incident(model, variant, variant.open, (at, reason))
    variant.open = variant.good = None
    return closed


def _incident(
    model: str, variant: Variant, tally: Tally, closed: tuple[float, str] | None = None
) -> Incident:
    good = variant.good
    assert good is not None
    evidence: dict[str, Any] = {
        "version": variant.name,
        "served_share": round(variant.share, 4),
        "requests": round(variant.requests),
        "last_good_version": good.name,
        "last_good_served_share": round(good.share, 4),
        "last_good_requests": round(good.requests),
        "causes": tally.causes_named(),
    }
    made = incident(
        IncidentKind.VERSION_REGRESSION,
        Severity.WARNING,
        Subject(variant.engines[-1], variant.incarnation_id, model),
        tally,
        variant.opened_at,
        summary=f"{variant.name} serves {variant.share:.1%} of the expected tokens, where "
        f"{good.name} served {good.share:.1%}",
        evidence=evidence,
        next_step=f"Go back to {good.name}, or compare both in the dashboard by cause of loss "
        f"(here mostly: {(tally.cause or 'none named').replace('_', ' ')}) and by configuration.",
        scope={"min_lost_tokens": 1},
        closed=closed,
    )
    return msgspec.structs.replace(made, engines=list(variant.engines))
