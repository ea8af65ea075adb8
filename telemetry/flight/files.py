"""The files of a flight recorder: a numbered series per engine, in a bounded folder.

Frames are appended unbuffered, so that whatever was written survives the
process, however it ends. A write that fails half-way is taken back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from kvlens.telemetry.flight import format as fmt
from kvlens.telemetry.records import EngineInfo

SHARE = 8
"""Files that share the bound of a folder: the oldest of them goes when a new one is opened."""


class FlightFiles:
    """Appends frames to the newest file of one engine. Not thread-safe.

    Args:
        folder: created if missing, accessible to this user only.
        info: the engine; its incarnation names the series.
        max_bytes: bound on all recordings in the folder, those of other engines
            included. A file that a running engine writes is never deleted.
    """

    def __init__(self, folder: Path, info: EngineInfo, max_bytes: int) -> None:
        self.folder = folder
        self.file_bytes = max_bytes // SHARE
        """Size at which a file is full."""
        self._info = info
        self._max_bytes = max_bytes
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(info.started_at))
        self._prefix = f"{started}-{re.sub('[^0-9A-Za-z]', '', info.incarnation_id)[:32]}-"
        self._number = 0
        self._fd: int | None = None
        self._size = 0

    def append(self, frames: bytes) -> None:
        """Append whole frames; raises OSError, after which the file is as it was before."""
        if self._fd is not None and (self._gone() or self._size + len(frames) > self.file_bytes):
            self.close()
        fd = self._open() if self._fd is None else self._fd
        try:
            _write(fd, frames)
        except OSError:
            try:
                os.ftruncate(fd, self._size)
            except OSError:
                self.close()  # readers stop at what was cut off; the next file has the rest
            raise
        self._size += len(frames)

    def close(self) -> None:
        """Close the newest file; the next frame opens another."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _gone(self) -> bool:
        """Whether the file, or the folder around it, was deleted or replaced."""
        assert self._fd is not None
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != self._identity

    def _open(self) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room()
        while (path := self.folder / f"{self._prefix}{self._number:06d}{fmt.SUFFIX}").exists():
            self._number += 1
        header = fmt.header(self._info, self._number)
        # A file has its name once its header is complete: readers of the folder find no stub.
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(unnamed, flags, 0o600)
        try:
            with contextlib.suppress(OSError):  # no locks on this file system: see _in_use
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(fd, header)
            unnamed.rename(path)
        except OSError:
            os.close(fd)
            unnamed.unlink(missing_ok=True)
            raise
        status = os.fstat(fd)
        self._path, self._identity = path, (status.st_dev, status.st_ino)
        self._fd, self._size = fd, len(header)
        self._number += 1
        return fd

    def _make_room(self) -> None:
        """Delete the oldest recordings until another full file fits within the bound."""
        files = []
        for path in self.folder.glob(f"*{fmt.SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                files.append((status.st_mtime_ns, path.name, status.st_size, path))
        total = sum(size for _, _, size, _ in files) + self.file_bytes
        for _, name, size, path in sorted(files):
            if total <= self._max_bytes:
                return
            if name.startswith(self._prefix) or not _in_use(path):
                path.unlink(missing_ok=True)
                total -= size


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _in_use(path: Path) -> bool:
    """Whether a running engine writes this file, or this cannot be told, or it is no recording."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        if os.read(fd, len(fmt.MAGIC)) != fmt.MAGIC:
            return True
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
