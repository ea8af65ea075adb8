"""Child processes that never outlive the demo.

Each child leads a process group of its own, since vLLM starts processes
itself: a group is ended as a whole. Ctrl-C, SIGTERM and SIGHUP become the
exception :class:`Interrupted`, so that ordinary clean-up runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from typing_extensions import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 10.0
"""How long a group may take to end by itself."""
TAIL_LINES = 25


class DemoError(Exception):
    """The demo cannot go on; the message says what to change."""


class Interrupted(BaseException):
    """A signal asked the demo to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class Child:
    """A running command, its output in a file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, which is the id of the group too."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the command itself still runs."""
        return self._process.poll() is None

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """Last lines that the command wrote."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "(it wrote nothing)"

    def require_alive(self) -> None:
        """Raise :class:`DemoError` with the log's last lines if the command has ended."""
        if not self.alive():
            raise DemoError(
                f"{self.name} ended with exit code {self._process.returncode}. Its last lines:\n"
                f"{self.log_tail()}"
            )

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Poll ``ready``; raise :class:`DemoError` if the command ends or time (seconds) is up."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.require_alive()
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{self.name} was not ready after {timeout:.0f} s. Its last lines:\n"
                    f"{self.log_tail()}"
                )
            time.sleep(0.2)

    def wait(self) -> None:
        """Wait until the command ends by itself."""
        self._process.wait()

    def stop(self) -> None:
        """End the whole group: SIGTERM first, SIGKILL for what is left after the grace time."""
        self._signal_group(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._signal_group(signal.SIGKILL)
        self._process.wait()

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)


class Supervisor:
    """Starts children and ends them, newest first, when its context ends.

    Meanwhile each of ``signals`` raises :class:`Interrupted`, once.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self._signals = signals
        self._children: list[Child] = []
        self._ending = False
        self._starting = False
        self._pending: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        self._previous = {
            signum: signal.signal(signum, self._on_signal) for signum in self._signals
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending = True
        for child in reversed(self._children):
            child.stop()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def start(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> Child:
        """Start ``command`` with ``env`` added to the environment, output to ``log``."""
        self._starting = True  # a signal between fork and append would lose the child
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            child = Child(name, process, log)
            self._children.append(child)
        finally:
            self._starting = False
        if self._pending is not None:
            raise Interrupted(self._pending)
        return child

    def stop(self, child: Child) -> None:
        """End one child now."""
        child.stop()
        self._children.remove(child)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._ending:  # an impatient second Ctrl-C must not leave orphans
            return
        if self._starting:
            self._pending = signum
            return
        self._ending = True
        raise Interrupted(signum)
