"""The command from outside, with a program in place of the engine's Python."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlens.dashboard.demo import engine, model
from kvlens.dashboard.demo.process import DemoError

FAKE_PYTHON = """#!/bin/sh
# Stands for an interpreter with vLLM: `-c` is the probe, `-m MODULE` the rest.
case "$1 $2" in
  -c*) echo 0.29.0 ;;
  *demo.model) ;;
  *) {server} ;;
esac
"""
HANGS = "sleep 600 & echo $$ $! > {pids}; wait"
DIES = "echo 'ValueError: no such block size' >&2; exit 3"


def fake_python(folder: Path, server: str) -> Path:
    path = folder / "fake-python"
    path.write_text(FAKE_PYTHON.format(server=server))
    path.chmod(0o755)
    return path


def demo(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvlens.dashboard.cli", "demo", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_server_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    process = demo("--no-serve", "--port", "0", "--engine-python", fake_python(tmp_path, DIES))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "exit code 3" in errors
    assert "ValueError: no such block size" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_that_was_started(tmp_path: Path, signum: signal.Signals) -> None:
    pids = tmp_path / "pids"
    python = fake_python(tmp_path, HANGS.format(pids=pids))
    process = demo("--port", "0", "--engine-python", python)
    deadline = time.monotonic() + 60
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(map(running, started))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2  # the dashboard and the server
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert not any(running(pid) for pid in (*started, *map(int, children)))
    assert "Traceback" not in errors


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = demo("--port", str(port), "--engine-python", fake_python(tmp_path, DIES))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"port {port} cannot be used" in errors
    assert "--port" in errors


def test_a_missing_interpreter_is_named() -> None:
    process = demo("--port", "0", "--engine-python", "/nowhere/python")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "/nowhere/python" in errors


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(DemoError, match="vLLM is not installed there"):
        engine.engine_version(str(bare))


def test_an_unwritable_json_path_is_refused(tmp_path: Path) -> None:
    process = demo("--port", "0", "--json", tmp_path / "missing" / "out.json")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "not a file that can be written" in errors


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none_is_bad_usage(port: str) -> None:
    process = demo(f"--port={port}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "is not a port" in errors


def test_the_interpreter_is_found_by_environment_then_beside_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = fake_python(tmp_path, DIES)
    monkeypatch.setenv(engine.ENGINE_PYTHON, str(named))
    assert engine.find_python() == str(named)
    monkeypatch.delenv(engine.ENGINE_PYTHON)
    beside = tmp_path / engine.AFFECTED_ENVIRONMENT / "bin" / "python"
    beside.parent.mkdir(parents=True)
    os.link(named, beside)
    monkeypatch.chdir(tmp_path)
    assert engine.find_python() == str(beside)


@pytest.mark.parametrize("size", [model.DEMO, model.TINY])
def test_a_model_has_windows_beside_full_attention(size: model.ModelSize) -> None:
    kinds = model.target_config(size)["layer_types"]
    assert len(kinds) == size.layers
    assert set(kinds) == {model.FULL, model.SLIDING}
    assert size.heads % size.kv_heads == 0


def test_a_gpu_gets_the_stock_offloading_spec_and_a_float32_backend(tmp_path: Path) -> None:
    options = {
        "python": "python",
        "model": tmp_path,
        "engine_id": "test",
        "chunk_tokens": 896,
        "gpu_blocks": 230,
        "max_model_len": 4608,
    }
    on_cpu = engine.command(engine.EngineOptions(**options), 1)
    on_cuda = engine.command(engine.EngineOptions(**options, device="cuda"), 1)
    assert "HostMemoryOffloadingSpec" in " ".join(on_cpu)
    assert "kvlens.connector.host_memory" not in " ".join(on_cuda)
    assert "spec_name" not in " ".join(on_cuda)
    assert on_cuda[on_cuda.index("--block-size") + 1] == "128"
    assert on_cuda[on_cuda.index("--attention-backend") + 1] == "TRITON_ATTN"
    assert not {"--block-size", "--attention-backend"} & set(on_cpu)
