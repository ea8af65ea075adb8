"""Static files: read once, served from memory with an address that changes with them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).with_name("static")
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


class Asset(NamedTuple):
    """One file as it is served."""

    body: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """All static files by path below ``static/``: no other path can ever be served."""
    return {
        path.relative_to(_FOLDER).as_posix(): Asset(
            path.read_bytes(), TYPES.get(path.suffix, "application/octet-stream")
        )
        for path in sorted(_FOLDER.rglob("*"))
        if path.is_file()
    }


@cache
def version() -> str:
    """Changes whenever any static file does.

    It is a folder of every address (``/static/<version>/css/base.css``), so that files
    that name each other by relative path, as modules and fonts do, change with it too.
    """
    digest = hashlib.sha256()
    for path, asset in assets().items():
        digest.update(path.encode() + b"\0" + asset.body)
    return digest.hexdigest()[:10]
