"""``kvlens size``: a trace in; a table, JSON and a picture out."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from kvlens.dashboard.sizing import report
from kvlens.dashboard.sizing.report import Sized
from kvlens.telemetry.sizing.measure import Question, measure
from kvlens.telemetry.sizing.memory import Memory
from kvlens.telemetry.sizing.reading import Trace
from kvlens.telemetry.sizing.routing import Routing
from kvlens.telemetry.sizing.trace import TraceError

OK, USAGE = 0, 2


def run(
    path: Path,
    block_tokens: int | None,
    question: Question,
    memory: Memory,
    json_path: Path | None = None,
    html_path: Path | None = None,
) -> int:
    """Size a trace, print the table, write what was asked for; returns the exit code."""
    for option, wanted in (("--json", json_path), ("--html", html_path)):
        if wanted is not None and not _writable(wanted):  # found before minutes of work
            return _refuse(f"{option} {wanted}: cannot be written there")
    try:
        sized = _sized(path, block_tokens, question, memory)
        if json_path is not None:
            body = msgspec.json.encode(report.as_json(sized))
            json_path.write_bytes(msgspec.json.format(body, indent=2) + b"\n")
        if html_path is not None:
            from kvlens.dashboard.sizing import page

            html_path.write_text(page.standalone(sized), encoding="utf-8")
    except TraceError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")
    sys.stdout.write(report.as_text(sized, sys.stdout.encoding or "ascii"))
    return OK


def _writable(path: Path) -> bool:
    """Whether a file can be written there; makes none."""
    return os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()


def _sized(path: Path, block_tokens: int | None, question: Question, memory: Memory) -> Sized:
    trace = Trace(path, block_tokens)
    began = time.monotonic()
    progress = _Progress() if sys.stderr.isatty() else None
    try:
        said = measure(trace, lambda: trace.block_tokens, question, progress)
    finally:
        if progress is not None:
            progress.end()
    if question.routing is not Routing.RECORDED and trace.engines > 1:
        raise TraceError(
            f"{path}: --engines: {trace.engines} engines recorded it, each with block numbers of "
            f"its own, so that requests cannot be spread anew; allowed: a recording of one engine"
        )
    return Sized(
        name=path.name,
        format=trace.format,
        chained_here=trace.chained_here,
        notes=tuple(trace.notes),
        said=said,
        memory=memory,
        seconds=time.monotonic() - began,
    )


class _Progress:
    """How far it is, on a terminal."""

    def __call__(self, requests: int) -> None:
        sys.stderr.write(f"\r{requests:,} requests")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line empty."""
        sys.stderr.write("\r\x1b[K")


def _refuse(message: str) -> int:
    print(f"kvlens size: {message}", file=sys.stderr)
    return USAGE
