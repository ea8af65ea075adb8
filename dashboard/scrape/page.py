"""One ``/metrics`` page, parsed: text or OpenMetrics exposition."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

_END: Final = "# EOF"
_LARGEST: Final = 1e100
"""Nothing counts that far; sums of such values would be infinite."""
_EXEMPLAR: Final = re.compile(r"(?<=[0-9]) # \{.*")


class PageError(ValueError):
    """Not a metrics page; the message says where and what it looks like."""


class Sample(NamedTuple):
    """One series' value."""

    labels: Mapping[str, str]
    value: float


Page = Mapping[str, list[Sample]]
"""Samples by name, with ``:`` in names as ``_``."""


def parse(text: str, names: Collection[str] | None = None) -> Page:
    """Parse a page; with ``names`` only samples of these, which is ten times faster.

    Raises :class:`PageError`.
    """
    if text.lstrip()[:1] == "<":
        raise PageError("it is HTML or XML, not a metrics page: give the address of /metrics")
    lines = text.splitlines()
    samples: Iterable[tuple[str, Mapping[str, str], float]]
    if text.rstrip().endswith(_END):
        samples = _open_metrics(text)
    else:
        samples = _text(lines if names is None else [x for x in lines if _name(x) in names])
    page: dict[str, list[Sample]] = {}
    for name, labels, value in samples:
        if abs(value) < _LARGEST:  # which NaN is not either
            page.setdefault(name.replace(":", "_"), []).append(Sample(labels, value))
    if not page and names is None:
        raise PageError("it holds no samples: save it again while the server runs")
    return page


def _name(line: str) -> str:
    end = min(filter(lambda at: at > 0, (line.find("{"), line.find(" "), len(line))))
    return line[:end].replace(":", "_")


def decode(data: bytes) -> str:
    """Text of a saved page: UTF-8, or UTF-16 with a mark as some shells write it."""
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf16 else "utf-8-sig", "replace")


def _text(lines: list[str]) -> list[tuple[str, Mapping[str, str], float]]:
    try:
        return _samples(lines)
    except (ValueError, KeyError, IndexError):
        # A part of an OpenMetrics page: its exemplars are no part of the text format.
        lines = [_EXEMPLAR.sub("", line) for line in lines]
    try:
        return _samples(lines)
    except (ValueError, KeyError, IndexError) as error:
        number = next((n for n, line in enumerate(lines, start=1) if not _readable(line)), 0)
        raise PageError(
            f"line {number} is no Prometheus metric: {lines[number - 1].strip()[:60]!r}"
        ) from error


def _samples(lines: list[str]) -> list[tuple[str, Mapping[str, str], float]]:
    return [
        (sample.name, sample.labels, float(sample.value))
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
    ]


def _readable(line: str) -> bool:
    try:
        return all(family.samples is not None for family in text_string_to_metric_families(line))
    except (ValueError, KeyError, IndexError):
        return False


def _open_metrics(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    try:
        families = openmetrics_families(text if text.endswith("\n") else text + "\n")  # type: ignore[no-untyped-call]
        for family in families:
            for sample in family.samples:
                yield sample.name, sample.labels, float(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise PageError(f"it cannot be read as OpenMetrics ({error})") from error


def total(page: Page, names: Iterable[str], **labels: str) -> float | None:
    """Sum of all samples of ``names`` with these labels; None when there is none."""
    values = [
        sample.value
        for name in names
        for sample in page.get(name, ())
        if all(sample.labels.get(key) == value for key, value in labels.items())
    ]
    return sum(values) if values else None
