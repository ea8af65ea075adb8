"""Numbers, sizes and times as people read them; used as template filters."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from urllib.parse import quote

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TOKEN_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
NONE = "–"  # noqa: RUF001 - the typographic dash is meant


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return NONE if value is None else f"{round(value):,}"


def compact(value: float | None) -> str:
    """A large number shortened to three digits and a suffix (k, M, G, T)."""
    if value is None:
        return NONE
    for factor, suffix in _TOKEN_UNITS:
        if abs(value) >= factor:
            factor = 1e3 if suffix == "k" else factor
            return f"{_three(value / factor)} {suffix}"
    return count(value)


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole``; never 0 % or 100 % unless exactly so."""
    if not whole:
        return NONE
    ratio = 100 * part / whole
    if 0 < ratio < 0.1:
        return "< 0.1 %"
    if 99.9 < ratio < 100:
        return "> 99.9 %"
    return f"{ratio:.0f} %" if ratio in (0, 100) or ratio >= 10 else f"{ratio:.1f} %"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return NONE
    power = min(int(math.log2(value) / 10), len(_BYTE_UNITS) - 1) if value >= 1 else 0
    return f"{_three(value / 1024**power)} {_BYTE_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that keeps two or three digits, from µs to days."""
    if seconds is None:
        return NONE
    if seconds <= 0:
        return "0 s"
    for factor, unit in ((1e-3, "µs"), (1.0, "ms")):
        if seconds < factor:
            return f"{_three(seconds / factor * 1000)} {unit}"
    for factor, unit in _TIME_UNITS:
        if seconds >= 2 * factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds)} s"


def utc(timestamp: float | None) -> str:
    """Absolute time, to the second, UTC."""
    if timestamp is None:
        return NONE
    return f"{_moment(timestamp):%Y-%m-%d %H:%M:%S} UTC"


def clock(timestamp: float | None) -> str:
    """Time of day with milliseconds, UTC; for the events of one request."""
    return NONE if timestamp is None else f"{_moment(timestamp):%H:%M:%S.%f}"[:-3]


def stamp(timestamp: float | None, now: float) -> str:
    """Time of day, UTC; with the date when it is not today."""
    if timestamp is None:
        return NONE
    moment = _moment(timestamp)
    today = moment.date() == _moment(now).date()
    return f"{moment:%H:%M:%S}" if today else f"{moment:%Y-%m-%d %H:%M}"


def iso(timestamp: float | None) -> str:
    """Machine-readable time for ``<time datetime>``."""
    return "" if timestamp is None else _moment(timestamp).isoformat()


def ago(timestamp: float | None, now: float) -> str:
    """Relative time: ``just now``, ``12 s ago``, ``3 h ago``, ``in 5 s``."""
    if timestamp is None:
        return NONE
    distance = now - timestamp
    if abs(distance) < 2:
        return "just now"
    seconds = math.floor(abs(distance))
    size, unit = next(((s, u) for s, u in _TIME_UNITS if seconds >= 2 * s), (1.0, "s"))
    text = f"{math.floor(seconds / size):,} {unit}"
    return f"{text} ago" if distance > 0 else f"in {text}"


def words(name: str) -> str:
    """An identifier of ours (``zero_hit``) as words."""
    return name.replace("_", " ")


def plural(number: float, one: str, many: str | None = None) -> str:
    """A count with its noun: ``1 chunk``, ``4,096 chunks``."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def short(identifier: str, keep: int = 14) -> str:
    """The head of a long identifier; the full one belongs in a title beside it."""
    return identifier if len(identifier) <= keep + 1 else identifier[:keep] + "…"


def path(identifier: str) -> str:
    """An identifier as one segment of an address."""
    return quote(identifier, safe="")


def _moment(timestamp: float) -> datetime:
    # Clamped: a nonsensical time from outside must not break the page that shows it.
    return datetime.fromtimestamp(min(max(timestamp, 0.0), 253402300799.0), tz=timezone.utc)


def _three(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
