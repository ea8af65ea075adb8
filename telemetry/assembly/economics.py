"""What losses cost and how large the tier should be, as numbers and in the records."""

from __future__ import annotations

from kvlens.telemetry import facts, semconv
from kvlens.telemetry.assembly.open_request import OpenRequest
from kvlens.telemetry.costs import PrefillRate
from kvlens.telemetry.records import EngineInfo, RequestRecord
from kvlens.telemetry.semconv import CAPACITY_MULTIPLES, Cause, Source, Tier
from kvlens.telemetry.sinks import Labels, MetricSink
from kvlens.telemetry.state.reuse import Ghosts, ReuseDistances

_TIERS = frozenset(map(str, Tier))


class Economics:
    """Follows one engine's steps, evictions and reuse; belongs to the drain thread."""

    def __init__(self, info: EngineInfo, metrics: MetricSink) -> None:
        self._metrics = metrics
        self._labels: dict[int, Labels] = {
            group.kv_group: (str(group.kv_group), group.group_kind) for group in info.layout.groups
        }
        self._capacity = info.capacity_chunks
        self._rate = PrefillRate(info.devices)
        self._ghosts = Ghosts()
        self._reuse = ReuseDistances(self._capacity) if self._capacity else None
        self._changed = False

    def step(self, fact: facts.Step) -> None:
        """An engine step that computed prompt tokens has ended."""
        self._rate.step(fact.seconds, fact.tokens)
        self._changed = True

    def offered(self, fact: facts.Offered, request: OpenRequest | None) -> None:
        """Chunks were offered: they are used, and some had been evicted before."""
        for key, distance in self._ghosts.returned(fact.offered):
            if (labels := self._labels.get(facts.group_of(key))) is not None:
                self._metrics.count(semconv.GHOST_CHUNKS, 1, labels)
            if self._capacity:
                self._metrics.observe(semconv.GHOST_DISTANCE, distance / self._capacity)
            if request is not None:
                request.ghost_chunks += 1
                request.ghost_distance = max(request.ghost_distance, distance)
        self._ghosts.evicted(fact.evicted)
        self._used(fact.offered, request)

    def loading(self, keys: facts.Keys, request: OpenRequest) -> None:
        """Chunks are loaded: they are used."""
        self._used(keys, request)

    def tiers(self, fact: facts.Tiers, request: OpenRequest) -> None:
        """vLLM said which tiers a request's tokens come from."""
        for name, tokens in fact.tokens.items():
            tier = name if name in _TIERS else str(Tier.EXTERNAL_UNSPECIFIED)
            request.tiers[tier] = request.tiers.get(tier, 0) + tokens
            self._metrics.count(semconv.TIER_TOKENS, tokens, (tier,))

    def charge(self, record: RequestRecord) -> None:
        """Put the price on a finished request's record, and count it."""
        if record.computed_tokens is not None:
            for source, tokens in (
                (Source.LOCAL, record.local_tokens),
                (Source.OFFLOAD, record.served_tokens),
                (Source.OTHER_CONNECTOR, record.other_tokens),
                (Source.COMPUTED, record.computed_tokens),
            ):
                self._metrics.count(semconv.PROMPT_TOKENS, tokens, (str(source),))
        lost = self._rate.device_seconds(record.lost_tokens)
        evicted = self._rate.device_seconds(record.evicted_tokens)
        record.lost_gpu_seconds = lost + evicted
        if record.evicted_tokens:
            self._metrics.count(semconv.EVICTED_TOKENS, record.evicted_tokens)
        for cause, seconds in (
            (record.cause or str(Cause.NOT_ATTRIBUTABLE), lost),
            (str(Cause.CAPACITY), evicted),
        ):
            if seconds:
                self._metrics.count(semconv.LOST_GPU_SECONDS, seconds, (cause,))

    def reset(self) -> None:
        """The tier was emptied: nobody misses what was evicted before."""
        self._ghosts.clear()

    def gauges(self) -> None:
        """Set the gauges, if anything has changed."""
        if not self._changed:
            return
        self._changed = False
        if (rate := self._rate.tokens_per_second) is not None:
            self._metrics.gauge(semconv.PREFILL_RATE, rate)
        ratios = self._reuse.hit_ratios() if self._reuse is not None else None
        for multiple, ratio in zip(CAPACITY_MULTIPLES, ratios or (), strict=False):
            self._metrics.gauge(semconv.HIT_RATIO, ratio, (f"{multiple:g}",))

    def _used(self, keys: facts.Keys, request: OpenRequest | None) -> None:
        if self._reuse is None:
            return
        for distance in self._reuse.used(keys):
            self._metrics.observe(semconv.REUSE_DISTANCE, distance)
            if request is not None:
                request.reuse_distance = max(request.reuse_distance or 0, distance)
        self._changed = True
