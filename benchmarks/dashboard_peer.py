"""The peer: Arize Phoenix, given the same OTLP bodies in the same run.

It is a general store of traces, not a detector: compared are the things that
both do, taking spans in and finding one request again.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
from dashboard_ingest import Exports, Rate, ids_of, send
from dashboard_process import Watched, quantile, started, wait_until

PACKAGE = "arize-phoenix==20.26.1"
_COUNT = "{ projects { edges { node { recordCount } } } }"
_FIND = """
query Find($condition: String!) {
  projects { edges { node { spans(first: 1, filterCondition: $condition) {
    edges { node { spanId attributes } } } } } }
}"""


class Peer(NamedTuple):
    """What was measured of it."""

    version: str
    rate: Rate
    find_ms: float
    find_p95_ms: float
    memory: float
    start_memory: float


def environment(folder: Path) -> Path:
    """Interpreter of an environment with Phoenix; builds it at the first time (850 MB)."""
    python = folder / "bin" / "python"
    if not (folder / "bin" / "phoenix").exists():
        print(f"installing {PACKAGE} into {folder} (minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", PACKAGE], check=True)
    return python


def measure(python: Path, exports: Exports, finds: int) -> Peer:
    """Start it on an empty folder, send everything, look requests up by their id."""
    version = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print(m.version('arize-phoenix'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        http, grpc = _free_port(), _free_port()
        env = {
            "PHOENIX_WORKING_DIR": folder,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(http),
            "PHOENIX_GRPC_PORT": str(grpc),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        command = [str(python.parent / "phoenix"), "serve"]
        with started(command, f"http://127.0.0.1:{http}", "/healthz", env) as server:
            idle = server.memory_mib()
            rate = _rate(server, exports)
            taken = [_find(server.url, ident) for ident in ids_of(exports, finds)]
            memory = server.memory_mib("VmHWM")
    return Peer(version, rate, quantile(taken, 0.5), quantile(taken, 0.95), memory, idle)


def _rate(server: Watched, exports: Exports) -> Rate:
    """Until all spans are there: it acknowledges before it stores."""
    cpu, began = server.cpu_seconds(), time.perf_counter()
    send(server.url, exports.bodies)
    wait_until(lambda: _spans(server.url) >= exports.spans, 1800)
    seconds, cpu = time.perf_counter() - began, server.cpu_seconds() - cpu
    size = sum(map(len, exports.bodies)) / 2**20
    count = len(exports.ids)
    return Rate(count, exports.spans, size, count / seconds, count / cpu)


def _spans(url: str) -> int:
    time.sleep(0.2)
    edges = _graphql(url, _COUNT, {})["projects"]["edges"]
    return sum(edge["node"]["recordCount"] for edge in edges)


def _find(url: str, ident: str) -> float:
    """Milliseconds until the span of a request id is found."""
    condition = f"attributes['gen_ai']['request']['id'] == '{ident}'"
    began = time.perf_counter()
    edges = _graphql(url, _FIND, {"condition": condition})["projects"]["edges"]
    taken = (time.perf_counter() - began) * 1e3
    if not any(edge["node"]["spans"]["edges"] for edge in edges):
        raise RuntimeError(f"the peer does not find {ident}")
    return taken


def _graphql(url: str, query: str, variables: dict[str, str]) -> dict[str, dict[str, list[dict]]]:  # type: ignore[type-arg]
    body = {"query": query, "variables": variables}
    answer = httpx.post(f"{url}/graphql", json=body, timeout=600).raise_for_status().json()
    if answer.get("errors"):
        raise RuntimeError(f"the peer answers {answer['errors']}")
    found: dict[str, dict[str, list[dict]]] = answer["data"]  # type: ignore[type-arg]
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
