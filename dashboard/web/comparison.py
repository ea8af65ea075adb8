"""Two versions or configurations side by side, from the sums of their engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlens.dashboard.model.engine import Engine
from kvlens.dashboard.model.totals import Totals, add_up, quantile
from kvlens.dashboard.view import format
from kvlens.telemetry.records import EngineInfo
from kvlens.telemetry.semconv import Verdict

_BETWEEN = " / "


@dataclass(frozen=True)
class Side:
    """All engines of one model, version and configuration."""

    key: str
    """What the address calls it."""
    label: str
    engines: int
    since: float
    until: float
    totals: Totals

    @property
    def requests(self) -> float:
        """Finished requests, weighted."""
        return sum(self.totals.requests.values())


@dataclass(frozen=True)
class Line:
    """One number of both sides."""

    name: str
    help: str
    values: tuple[str, str]
    better: int | None
    """Side (0 or 1) that does better by it; None where there is no better, or no difference."""


def key_of(info: EngineInfo) -> str:
    """Model, versions and configuration, as in an address."""
    return _BETWEEN.join(
        (
            info.model.replace(_BETWEEN, "/"),
            f"vLLM {info.vllm_version}",
            f"kvlens {info.kvlens_version}",
            info.lookup,
            f"{info.layout.blocks_per_chunk} blocks per chunk",
            "no capacity told"
            if info.capacity_chunks is None
            else f"{info.capacity_chunks} chunks",
        )
    )


def differing(one: str, other: str) -> tuple[str, str] | None:
    """What two keys do not have in common; None if they are equal."""
    both = zip(one.split(_BETWEEN), other.split(_BETWEEN), strict=True)
    rest = [pair for pair in both if pair[0] != pair[1]]
    if not rest:
        return None
    return ", ".join(a for a, _ in rest), ", ".join(b for _, b in rest)


def sides(engines: Iterable[Engine]) -> list[Side]:
    """One per configuration that was seen, the newest first."""
    found: dict[str, list[Engine]] = {}
    for engine in engines:
        found.setdefault(key_of(engine.info), []).append(engine)
    made = [
        Side(
            key=key,
            label=key,
            engines=len(group),
            since=min(engine.info.started_at for engine in group),
            until=max(engine.last_seen for engine in group),
            totals=add_up(engine.totals for engine in group),
        )
        for key, group in found.items()
    ]
    return sorted(made, key=lambda side: -side.until)


def choose(known: Sequence[Side], one: str, other: str) -> tuple[Side, Side] | None:
    """The two that are asked for, else the two newest of one model; None with fewer than two."""
    by_key = {side.key: side for side in known}
    if one in by_key and other in by_key and one != other:
        return by_key[one], by_key[other]
    if one in by_key:
        rest = [side for side in known if side.key != one]
        return (by_key[one], rest[0]) if rest else None
    for number, side in enumerate(known):
        model = side.key.split(_BETWEEN)[0]
        for older in known[number + 1 :]:
            if older.key.split(_BETWEEN)[0] == model:
                return older, side
    return (known[1], known[0]) if len(known) > 1 else None


def lines(one: Totals, other: Totals) -> list[Line]:
    """What is compared; shares and percentiles, so that different amounts of traffic compare."""
    return [
        _shares(
            "Served of expected",
            "Tokens loaded, of those that offloading should have served",
            one,
            other,
            "served_tokens",
            "expected_tokens",
            more_is_better=True,
        ),
        _shares(
            "Lost of expected",
            "Tokens computed again although the tier should have had them",
            one,
            other,
            "lost_tokens",
            "expected_tokens",
            more_is_better=False,
        ),
        _shares(
            "Servable of expected",
            "Tokens that were in the tier when it was asked",
            one,
            other,
            "servable_tokens",
            "expected_tokens",
            more_is_better=True,
        ),
        _verdicts("Requests that lost all", Verdict.LOST, one, other),
        _verdicts("Requests that lost a part", Verdict.PARTIAL, one, other),
        _verdicts("Requests served in full", Verdict.FULL, one, other, more_is_better=True),
        _times("Reload p50", 0.5, one, other),
        _times("Reload p95", 0.95, one, other),
        _per_request("GPU time lost per request", one, other),
    ]


def _line(
    name: str,
    help_: str,
    numbers: tuple[float | None, float | None],
    texts: tuple[str, str],
    more_is_better: bool,
) -> Line:
    first, second = numbers
    better = None
    if first is not None and second is not None and texts[0] != texts[1]:
        better = int((second > first) == more_is_better)
    return Line(name, help_, texts, better)


def _shares(
    name: str,
    help_: str,
    one: Totals,
    other: Totals,
    part: str,
    whole: str,
    *,
    more_is_better: bool,
) -> Line:
    parts = [(getattr(t, part), getattr(t, whole)) for t in (one, other)]
    numbers = [p / w if w else None for p, w in parts]
    texts = [format.percent(p, w) for p, w in parts]
    return _line(name, help_, (numbers[0], numbers[1]), (texts[0], texts[1]), more_is_better)


def _verdicts(
    name: str, verdict: Verdict, one: Totals, other: Totals, *, more_is_better: bool = False
) -> Line:
    counts = [(t.requests.get(str(verdict), 0.0), sum(t.requests.values())) for t in (one, other)]
    numbers = [n / all_ if all_ else None for n, all_ in counts]
    texts = [format.percent(n, all_) for n, all_ in counts]
    help_ = f"Requests with the verdict {verdict}, of all"
    return _line(name, help_, (numbers[0], numbers[1]), (texts[0], texts[1]), more_is_better)


def _times(name: str, q: float, one: Totals, other: Totals) -> Line:
    numbers = quantile(one.reload_buckets, q), quantile(other.reload_buckets, q)
    texts = format.duration(numbers[0]), format.duration(numbers[1])
    return _line(name, "From allocation until the load was finished", numbers, texts, False)


def _per_request(name: str, one: Totals, other: Totals) -> Line:
    counts = [(t.lost_gpu_seconds, sum(t.requests.values())) for t in (one, other)]
    numbers = [seconds / requests if requests else None for seconds, requests in counts]
    texts = format.duration(numbers[0]), format.duration(numbers[1])
    return _line(
        name,
        "Device time of computing again what could have been loaded",
        (numbers[0], numbers[1]),
        texts,
        False,
    )
