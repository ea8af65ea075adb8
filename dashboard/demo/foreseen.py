"""A target, and a drafter that foresees what it says, as long as its own KV is right.

Random drafters have nothing accepted, so that an acceptance rate tells nothing. Here
the target's first layer decides alone (the others add nothing), and the drafter's one
layer is a copy of it that looks at the same words, a position later. Its guess is the
target's next word wherever it remembers the same past, and most of what it says comes
from that past: KV of the drafter that is missing or wrong costs acceptance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.dashboard.demo.layers import ModelSize, layer_shapes, random_weights
from kvlens.dashboard.demo.layers import shared_config as shared

if TYPE_CHECKING:
    from kvlens.dashboard.demo.layers import Weights

LOOK_CLOSER, SAY_LOUDER = 4.0, 4.0
"""Factors of queries and of attention's output: few past words decide, and decide much."""


def target_config(size: ModelSize) -> dict[str, Any]:
    """Llama, whose layers may have windows as well."""
    return {
        **shared(size),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": size.layers,
        "sliding_window": size.sliding_window,
        "layer_types": [size.pattern[layer % len(size.pattern)] for layer in range(size.layers)],
    }


def target_weights(size: ModelSize, seed: int) -> Weights:
    """Random, but for the layers after the first, which add nothing."""
    import numpy as np

    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocab, size.hidden),
        "model.norm.weight": (size.hidden,),
        "lm_head.weight": (size.vocab, size.hidden),
    }
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        shapes |= layer_shapes(size, prefix)
        shapes[f"{prefix}.input_layernorm.weight"] = (size.hidden,)
    weights = random_weights(shapes, seed)
    words = weights["model.embed_tokens.weight"]
    # The drafter has no norm there: words of length one per dimension need none.
    words /= np.sqrt(np.mean(words**2, axis=1, keepdims=True))
    weights["model.layers.0.self_attn.q_proj.weight"] *= np.float32(LOOK_CLOSER)
    weights["model.layers.0.self_attn.o_proj.weight"] *= np.float32(SAY_LOUDER)
    for layer in range(1, size.layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"] *= np.float32(0)
    return weights


def drafter_weights(size: ModelSize, seed: int) -> Weights:
    """The target's first layer, fed with words alone."""
    import numpy as np

    first = "model.layers.0."
    weights = {
        f"layers.0.{name.removeprefix(first)}": values
        for name, values in target_weights(size, seed).items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    if not size.drafter_remembers:
        weights["layers.0.self_attn.o_proj.weight"] *= np.float32(0)
    words = np.eye(size.hidden, dtype=np.float32)
    weights["fc.weight"] = np.concatenate([words, np.zeros_like(words)], axis=1)
    return weights
