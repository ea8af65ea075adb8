"""Reads other connectors' and engines' series off a page (see ``connectors``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvlens.dashboard.scrape import connectors as c
from kvlens.dashboard.scrape.page import Page, Sample

_MODEL: Final = ("served_model_name", "model_name")
HOST_SIZE: Final = "sglang_hicache_host_total_tokens"
HOST_USED: Final = "sglang_hicache_host_used_tokens"
"""Gauges that SGLang has only with its hierarchical cache on."""
NAMES: Final = c.NAMES | {HOST_SIZE, HOST_USED}
"""All names that :func:`systems` looks at."""


class Foreign(NamedTuple):
    """What a page tells of one system."""

    system: str
    counters: dict[str, float]
    usage: float | None
    """Use of the GPU cache, 0 to 1."""
    model: str


def systems(page: Page) -> list[Foreign]:
    """One entry per system that has a series on the page, in the order of the table."""
    names = dict.fromkeys(series.system for series in c.SERIES)
    found = (_system(page, name) for name in names)
    return [one for one in found if one is not None]


def _system(page: Page, system: str) -> Foreign | None:
    counters: dict[str, float] = {}
    usage, model = None, ""
    for series in (series for series in c.SERIES if series.system == system):
        if (samples := page.get(series.name)) is None:
            continue
        model = model or _model(samples)
        wanted = [sample for sample in samples if _wanted(sample, series.labels)]
        if series.counts == c.USAGE:
            usage = max((sample.value for sample in wanted), default=usage)
        else:
            counters[series.counts] = counters.get(series.counts, 0.0) + once(wanted)
    if not counters and usage is None:
        return None
    if system == c.SGLANG:
        _hierarchical(page, counters)
    return Foreign(system, counters, usage, model)


def _hierarchical(page: Page, counters: dict[str, float]) -> None:
    """What SGLang's tier was asked for and holds; nothing if it has none."""
    if c.STORED not in counters and HOST_SIZE not in page:
        counters.pop(c.HITS, None)
        return
    # SGLang counts prompts, not lookups: the tier is asked for what the GPU does not have.
    asked = counters.get(c.LOCAL_ASKED, 0.0) - counters.get(c.LOCAL_HITS, 0.0)
    counters[c.ASKED] = max(0.0, asked)
    counters.setdefault(c.HITS, 0.0)
    if not any(sample.value for sample in page.get(HOST_USED, ())):
        counters.setdefault(c.STORED, 0.0)  # vLLM and SGLang create most series at first use


def once(samples: Iterable[Sample]) -> float:
    """Sum of samples in which workers that count the same tokens count once."""
    largest: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in c.RANKS))
        largest[key] = max(sample.value, largest.get(key, 0.0))
    return sum(largest.values())


def _wanted(sample: Sample, labels: Mapping[str, frozenset[str]]) -> bool:
    return all(_plain(sample.labels.get(name, "")) in values for name, values in labels.items())


def _plain(value: str) -> str:
    """``storage_mooncake`` and the like are kinds of ``storage``."""
    return "storage" if value.startswith("storage") else value


def _model(samples: Iterable[Sample]) -> str:
    told = (sample.labels.get(name, "") for name in _MODEL for sample in samples)
    return next(filter(None, told), "")
