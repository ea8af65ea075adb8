"""What all generated models have in common: sizes, configuration, shapes, random weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[np.float32]]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Family(str, Enum):
    """How a model is built."""

    ATTENTION = "attention"
    """Olmo 3, which mixes full attention and windows, and an EAGLE drafter."""
    RECURRENT = "recurrent"
    """Qwen3-Next: gated delta nets (GDN) beside full attention; no drafter."""
    FORESEEN = "foreseen"
    """Llama and a drafter that knows what it will say: see ``foreseen.py``."""


@dataclass(frozen=True)
class ModelSize:
    """What decides the cost of computing a prompt and the bytes of its KV."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    pattern: tuple[str, ...]
    """Kinds of layers, repeated until there are ``layers`` of them."""
    sliding_window: int = 128
    max_tokens: int = 8192
    family: Family = Family.ATTENTION
    drafter_remembers: bool = True
    """False, in :attr:`Family.FORESEEN`: the drafter's attention adds nothing."""


def shared_config(size: ModelSize) -> dict[str, Any]:
    """What all configurations here have in common."""
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_position_embeddings": size.max_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def layer_shapes(size: ModelSize, prefix: str) -> dict[str, tuple[int, ...]]:
    """Weights of a Llama layer that are named alike in all models here."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, size.hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, size.hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, size.hidden),
        f"{prefix}.self_attn.o_proj.weight": (size.hidden, queries),
        f"{prefix}.mlp.gate_proj.weight": (size.intermediate, size.hidden),
        f"{prefix}.mlp.up_proj.weight": (size.intermediate, size.hidden),
        f"{prefix}.mlp.down_proj.weight": (size.hidden, size.intermediate),
        f"{prefix}.post_attention_layernorm.weight": (size.hidden,),
    }


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> Weights:
    """Matrices scaled by their fan-in; vectors, which are gains of norms, are ones."""
    import numpy as np

    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:  # a norm's gain
            weights[name] = np.ones(shape, dtype=np.float32)
        else:
            values = generator.standard_normal(shape, dtype=np.float32)
            weights[name] = values * np.float32(shape[-1] ** -0.5)
    return weights
