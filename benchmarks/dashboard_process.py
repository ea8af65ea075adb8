"""A program under measurement: started on its own core, watched from outside."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

MIB = 1 << 20


class Watched:
    """A running process and all that it started."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._pid = process.pid
        self.url = url

    def cpu_seconds(self) -> float:
        """User and system time of all threads so far."""
        return time.clock_gettime((~self._pid << 3) | 2)  # clock_getcpuclockid(3)

    def memory_mib(self, field: str = "VmRSS") -> float:
        """Resident memory now; ``VmHWM`` for the most so far."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024 / MIB


@contextmanager
def started(
    command: Sequence[str], url: str, ready: str, env: dict[str, str] | None = None
) -> Iterator[Watched]:
    """Run ``command`` on the first core until the block ends; ``ready`` is a path that answers."""
    own = sorted(os.sched_getaffinity(0))
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, own[:1]),
    )
    try:
        if len(own) > 1:
            os.sched_setaffinity(0, own[1:])  # whoever measures keeps off the first core
        wait_until(lambda: _answers(url + ready, process), 180)
        yield Watched(process, url)
    finally:
        os.sched_setaffinity(0, own)
        process.terminate()
        process.wait(60)


def wait_until(condition: Callable[[], object], patience: float) -> float:
    """Wait for a true value; returns the seconds that it took. Raises ``TimeoutError``."""
    started_at = time.perf_counter()
    while not condition():
        if time.perf_counter() - started_at > patience:
            raise TimeoutError(f"nothing happened within {patience:.0f} s")
        time.sleep(0.02)
    return time.perf_counter() - started_at


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share ``q`` lies (nearest rank)."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]
