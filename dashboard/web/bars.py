"""The token bar of a request: percentages for SVG attributes."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.telemetry.records import RequestRecord


@dataclass(frozen=True)
class Part:
    """One part of a bar: tokens, and the percentages to draw it."""

    key: str
    tokens: int
    x: str
    width: str


def percent(value: float, whole: float) -> str:
    """A position on an axis as an SVG percentage."""
    return f"{100 * value / whole:.4f}".rstrip("0").rstrip(".") + "%"


def token_parts(record: RequestRecord) -> list[Part]:
    """Split the prompt: local, served, lost (recomputed), new. The parts always add up."""
    whole = max(record.prompt_tokens, 1)
    left = record.prompt_tokens
    parts: list[Part] = []
    for key, tokens in (
        ("local", record.local_tokens),
        ("served", record.served_tokens),
        ("lost", record.lost_tokens),
        ("new", left),
    ):
        shown = max(min(tokens, left), 0)
        start = record.prompt_tokens - left
        parts.append(Part(key, shown, percent(start, whole), percent(shown, whole)))
        left -= shown
    return parts
