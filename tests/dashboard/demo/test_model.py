"""The generated models: what tests and benchmarks rely on about their weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvlens.dashboard.demo import model
from kvlens.dashboard.demo.layers import FULL, LINEAR, SLIDING, Family

TINY_SIZES = {name: size for name, size in model.SIZES.items() if size != model.DEMO}


@pytest.mark.parametrize("name", TINY_SIZES)
def test_every_size_is_written(name: str, tmp_path: Path) -> None:
    size = TINY_SIZES[name]
    model.write(tmp_path, size)
    config = json.loads((model.target_folder(tmp_path) / "config.json").read_text())
    kinds = config["layer_types"]
    assert len(kinds) == config["num_hidden_layers"] == size.layers
    assert set(kinds) == set(size.pattern)
    has_drafter = (model.drafter_folder(tmp_path) / "model.safetensors").exists()
    assert has_drafter is (size.family is not Family.RECURRENT)


def test_there_is_a_size_of_each_kind() -> None:
    patterns = {frozenset(size.pattern) for size in TINY_SIZES.values()}
    assert {frozenset({FULL}), frozenset({FULL, SLIDING}), frozenset({FULL, LINEAR})} <= patterns


def test_a_state_remembers_hundreds_of_tokens(tmp_path: Path) -> None:
    model.write(tmp_path, model.SIZES["tiny-recurrent"])
    weights = load_file(model.target_folder(tmp_path) / "model.safetensors")
    decay = weights["model.layers.0.linear_attn.A_log"]
    bias = weights["model.layers.0.linear_attn.dt_bias"]
    kept_per_token = np.exp(-np.exp(decay) * np.log1p(np.exp(bias)))
    assert (kept_per_token**200 > 0.4).all()
    # These norms add one to their gain.
    assert not weights["model.layers.0.input_layernorm.weight"].any()


@pytest.mark.parametrize(("name", "remembers"), [("foreseen", True), ("foreseen-forgetful", False)])
def test_a_foreseeing_drafter_is_the_only_layer_that_counts(
    name: str, remembers: bool, tmp_path: Path
) -> None:
    size = model.SIZES[name]
    model.write(tmp_path, size)
    target = load_file(model.target_folder(tmp_path) / "model.safetensors")
    drafter = load_file(model.drafter_folder(tmp_path) / "model.safetensors")
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        copied = drafter[f"layers.0.{part}.weight"]
        assert np.array_equal(copied, target[f"model.layers.0.{part}.weight"])
    assert bool(drafter["layers.0.self_attn.o_proj.weight"].any()) is remembers
    for layer in range(1, size.layers):
        assert not target[f"model.layers.{layer}.self_attn.o_proj.weight"].any()
        assert not target[f"model.layers.{layer}.mlp.down_proj.weight"].any()
    words = target["model.embed_tokens.weight"]
    assert np.allclose(np.mean(words**2, axis=1), 1, atol=1e-5)
