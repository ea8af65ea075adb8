"""Models with random weights and an EAGLE drafter, generated locally.

Full-attention and sliding-window layers mix, so vLLM makes several KV-cache
groups; the drafter turns the block drop of speculative decoding on.
Weights are scaled as in a trained model, so that what is generated depends on
the whole prompt: reloaded KV that was wrong would change the output.

Run as a module by the engine's interpreter, which has NumPy and safetensors,
with the name of a size in :data:`SIZES`::

    python -m kvlens.dashboard.demo.model FOLDER demo
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.dashboard.demo import foreseen, recurrent
from kvlens.dashboard.demo.layers import (
    FULL,
    LINEAR,
    SLIDING,
    Family,
    ModelSize,
    layer_shapes,
    random_weights,
    shared_config,
)

if TYPE_CHECKING:
    from kvlens.dashboard.demo.layers import Weights

DEMO = ModelSize(
    layers=8,
    hidden=512,
    intermediate=1536,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=1024,
    pattern=(FULL, FULL, FULL, SLIDING),
)
"""About 25 M weights: a prompt of 4,000 tokens takes seconds on two cores."""
TINY = ModelSize(
    layers=4,
    hidden=128,
    intermediate=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    pattern=(SLIDING, FULL),
)
"""Under 1 M weights: for tests, where only the bookkeeping matters."""
TINY_RECURRENT = replace(
    TINY,
    pattern=(LINEAR, LINEAR, FULL),
    family=Family.RECURRENT,
    # vLLM makes attention's blocks as large as a state: with these, 128 tokens.
    kv_heads=4,
    head_dim=128,
)
FORESEEN = replace(TINY, pattern=(FULL, SLIDING), family=Family.FORESEEN)
SIZES = {
    "demo": DEMO,
    "tiny": TINY,
    "tiny-full": replace(TINY, pattern=(FULL,)),
    "tiny-recurrent": TINY_RECURRENT,
    "foreseen": FORESEEN,
    "foreseen-full": replace(FORESEEN, pattern=(FULL,)),
    "foreseen-forgetful": replace(FORESEEN, drafter_remembers=False),
}
FIRST_WORD = 3
"""Ids below it are the unknown, begin and end tokens."""


def target_folder(folder: Path) -> Path:
    """Where :func:`write` puts the target model."""
    return folder / "target"


def drafter_folder(folder: Path) -> Path:
    """Where :func:`write` puts the EAGLE drafter."""
    return folder / "drafter"


def write(folder: Path, size: ModelSize, seed: int = 0) -> None:
    """Write target and, but for recurrent ones, drafter (config, tokenizer, weights)."""
    target, drafter = target_folder(folder), drafter_folder(folder)
    if size.family is Family.RECURRENT:
        save(target, recurrent.config(size), recurrent.weights(size, seed))
    elif size.family is Family.FORESEEN:
        save(target, foreseen.target_config(size), foreseen.target_weights(size, seed))
        save(drafter, drafter_config(size), foreseen.drafter_weights(size, seed))
    else:
        save(target, target_config(size), random_weights(_target_shapes(size), seed))
        save(drafter, drafter_config(size), random_weights(_drafter_shapes(size), seed))
    _write_tokenizer(target, size)


def save(folder: Path, config: dict[str, Any], weights: Weights) -> None:
    """Write one model's files."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def target_config(size: ModelSize) -> dict[str, Any]:
    """Olmo 3: some layers attend to everything, the others to a window."""
    return {
        **shared_config(size),
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": size.layers,
        "attention_bias": False,
        "sliding_window": size.sliding_window,
        "layer_types": [size.pattern[layer % len(size.pattern)] for layer in range(size.layers)],
    }


def drafter_config(size: ModelSize) -> dict[str, Any]:
    """One Llama layer over the target's hidden states, as EAGLE has it."""
    return {
        **shared_config(size),
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }


def _target_shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocab, size.hidden),
        "model.norm.weight": (size.hidden,),
        "lm_head.weight": (size.vocab, size.hidden),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        shapes |= layer_shapes(size, prefix)
        shapes |= {
            f"{prefix}.self_attn.q_norm.weight": (size.heads * size.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (size.kv_heads * size.head_dim,),
            f"{prefix}.post_feedforward_layernorm.weight": (size.hidden,),
        }
    return shapes


def _drafter_shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    return {"fc.weight": (size.hidden, 2 * size.hidden), **layer_shapes(size, "layers.0")}


def _write_tokenizer(folder: Path, size: ModelSize) -> None:
    """One word per token id, so that text and token ids say the same."""
    vocabulary = {f"w{token}": token for token in range(size.vocab)}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "w0",
            "bos_token": "w1",
            "eos_token": "w2",
            "model_max_length": size.max_tokens,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]), SIZES[sys.argv[2]])
