"""The demo's A/B on a GPU: real CUDA transfers, vLLM's own offloading spec.

    python tests/gpu/ab.py [--engine-python PYTHON] [--json FILE]

Runs `kvlens demo --device cuda` on the vLLM beside PYTHON (default: this one) and prints
its table. On a vLLM that has the zero-hit defect (before 0.30) all that the demo must show
is required; on a newer one, that both arms reload. Exit code 0 if it was shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CORRECTED_IN = (0, 30)
"""The first vLLM whose own lookup finds what was stored."""


def has_cuda(python: str) -> bool:
    """Whether PyTorch beside ``python`` can use a GPU of NVIDIA's."""
    probe = "import sys, torch; sys.exit(not (torch.version.cuda and torch.cuda.is_available()))"
    return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0


def run_demo(python: str, json_path: Path) -> int:
    """Run the demo on the GPU; its table goes to standard output."""
    command = [sys.executable, "-m", "kvlens.dashboard.cli", "demo", "--no-serve", "--port", "0"]
    command += ["--device", "cuda", "--engine-python", python, "--json", str(json_path)]
    return subprocess.run(command, check=False).returncode


def missing(code: int, document: dict[str, Any]) -> list[str]:
    """What the demo should have shown and did not."""
    version = tuple(map(int, document["vllm_version"].split(".")[:2]))
    if version < CORRECTED_IN:
        return document["failed"] or ([f"the demo ended with exit code {code}"] if code else [])
    found = []
    for name, arm in document["arms"].items():
        if not 0 < arm["served_tokens"] == arm["servable_tokens"]:
            found.append(f"{name}: served {arm['served_tokens']} of {arm['servable_tokens']}")
        if not arm["loaded_bytes"] > 0:
            found.append(f"{name}: nothing was loaded")
        if not arm["outputs_identical"]:
            found.append(f"{name}: outputs differ")
        if arm["incidents"]:
            found.append(f"{name}: {', '.join(one['kind'] for one in arm['incidents'])}")
        if arm["records"] != arm["requests"]:
            found.append(f"{name}: {arm['records']} records of {arm['requests']} requests")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not has_cuda(options.engine_python):
        print(f"PyTorch of {options.engine_python} sees no NVIDIA GPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder) / "gpu.json"
        path.unlink(missing_ok=True)  # of an earlier run
        code = run_demo(options.engine_python, path)
        if not path.exists():  # it could not run, and said why
            return code or 2
        document = json.loads(path.read_text())
    failed = missing(code, document)
    print("not shown: " + "; ".join(failed) if failed else "shown on this GPU", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
