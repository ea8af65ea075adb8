"""The script that lays engines out, without a network and without an engine."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "vllm/__init__.py": b"VERSION = 'layered'\n",
    "vllm/_C.abi3.so": b"compiled",
    "vllm/lib.so.2": b"compiled",
    "vllm/program": bytes(3_000_000),
    "vllm-1.0.dist-info/METADATA": b"Name: vllm\n",
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on an empty checkout whose `.venv` holds one module; pip finds one wheel."""
    spec = importlib.util.spec_from_file_location("kvlens_engines", ROOT / "scripts" / "engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    newest = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", newest], check=True)
    packages = next(newest.glob("lib/python*/site-packages"))
    (packages / "shared_thing.py").write_text("VALUE = 7\n")
    (packages / "vllm.py").write_text("VERSION = 'newest'\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "NEWEST", newest)
    monkeypatch.setattr(module, "LOCK", tmp_path / "engines.lock")
    monkeypatch.setattr(module, "fetch", fetch)
    return module


def fetch(requirement: str, folder: Path) -> Path:
    path = folder / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return path


def layer(script: ModuleType, level: str = "SCHEDULER") -> Any:
    engine = script.VERSIONS["Engine"]("1.0", script.VERSIONS["Level"][level], "vllm")
    return script.Layer(engine)


def files(layer: Any) -> set[str]:
    (packages,) = layer.path.glob("lib/python*/site-packages")
    return {name for name in FILES if (packages / name).is_file()}


def test_a_layer_sees_its_own_vllm_and_shares_the_rest(script: ModuleType) -> None:
    one = layer(script)
    script.write_lock([one])
    script.lay_out([one])
    code = "import vllm, shared_thing; print(vllm.VERSION, shared_thing.VALUE)"
    run = subprocess.run([script.python_of(one.path), "-c", code], capture_output=True, text=True)
    assert run.stdout == "layered 7\n", run.stderr


def test_what_never_serves_keeps_no_compiled_code(script: ModuleType) -> None:
    one = layer(script)
    script.write_lock([one])
    script.lay_out([one])
    assert files(one) == {"vllm/__init__.py", "vllm-1.0.dist-info/METADATA"}


def test_what_serves_keeps_it(script: ModuleType) -> None:
    one = layer(script, "SERVER")
    script.write_lock([one])
    script.lay_out([one])
    assert files(one) == set(FILES)


def test_the_lock_holds_the_wheels_hash_and_only_what_is_listed(
    script: ModuleType, tmp_path: Path
) -> None:
    script.LOCK.write_text("# about it\nvllm==0.9 --hash=sha256:00\n")
    script.write_lock([layer(script)])
    expected = hashlib.sha256(fetch("", tmp_path).read_bytes()).hexdigest()
    assert script.LOCK.read_text() == f"# about it\nvllm==1.0 --hash=sha256:{expected}\n"


def test_without_a_hash_nothing_is_laid_out(script: ModuleType) -> None:
    with pytest.raises(script.EngineError, match=r"no hash of vllm==1\.0: run .* --lock"):
        script.lay_out([layer(script)])


def test_without_the_newest_environment_it_says_what_to_do(script: ModuleType) -> None:
    shutil.rmtree(script.NEWEST)
    with pytest.raises(script.EngineError, match="run `make environments` first"):
        script.lay_out([layer(script)])


def test_a_finished_layer_is_reused_and_an_interrupted_one_is_not(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = layer(script)
    script.write_lock([one])
    with monkeypatch.context() as patch:
        patch.setattr(script, "unpack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.build()
    assert not one.ready()
    script.lay_out([one])
    assert one.ready()
    monkeypatch.setattr(script, "call", interrupt)
    script.lay_out([one])
    script.LOCK.write_text("vllm==1.0 --hash=sha256:11\n")
    assert not one.ready()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_every_engine_without_an_environment_of_its_own_is_locked() -> None:
    lock = (ROOT / "requirements" / "engines.lock").read_text()
    versions = importlib.import_module("kvlens.connector.versions")
    locked = {line.split(" ")[0] for line in lock.splitlines() if not line.startswith("#")}
    assert locked == {
        f"{engine.package}=={engine.version}"
        for engine in versions.SUPPORTED
        if engine.environment is None
    }
    assert lock.count("--hash=sha256:") == len(locked)
