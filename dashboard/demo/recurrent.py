"""Qwen3-Next with random weights: layers whose whole past is one recurrent state (GDN).

Not Qwen 3.5, whose code in vLLM needs torchvision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.dashboard.demo.layers import LINEAR, ModelSize, layer_shapes, random_weights
from kvlens.dashboard.demo.layers import shared_config as shared

if TYPE_CHECKING:
    from kvlens.dashboard.demo.layers import Weights

STATE_DIM = 128
"""Keys and values of a state: vLLM's kernels for the CPU know no other."""
STATE_HEADS = 2
KERNEL, EXPERTS = 4, 4
LOG_DECAY = -6.0
"""A state loses about 0.2 % per token: one that is wrong shows for hundreds of tokens."""


def config(size: ModelSize) -> dict[str, Any]:
    """Configuration of the target."""
    return {
        **shared(size),
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": size.layers,
        "layer_types": _kinds(size),
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": STATE_DIM,
        "linear_value_head_dim": STATE_DIM,
        "linear_num_key_heads": STATE_HEADS,
        "linear_num_value_heads": STATE_HEADS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        # The model must have one layer of experts.
        "mlp_only_layers": list(range(size.layers - 1)),
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden,
        "shared_expert_intermediate_size": size.hidden,
        # States in the precision of the rest, so that reloading loses nothing.
        "mamba_ssm_dtype": "float32",
    }


def weights(size: ModelSize, seed: int) -> Weights:
    """Weights of the target."""
    import numpy as np

    found = random_weights(_shapes(size), seed)
    for name, values in found.items():
        if name.endswith("A_log"):
            found[name] = np.full_like(values, LOG_DECAY)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            found[name] = np.zeros_like(values)  # these norms add one to their gain
    return found


def _kinds(size: ModelSize) -> list[str]:
    return [size.pattern[layer % len(size.pattern)] for layer in range(size.layers)]


def _shapes(size: ModelSize) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocab, size.hidden),
        "model.norm.weight": (size.hidden,),
        "lm_head.weight": (size.vocab, size.hidden),
    }
    for layer, kind in enumerate(_kinds(size)):
        prefix = f"model.layers.{layer}"
        common = layer_shapes(size, prefix)
        common[f"{prefix}.input_layernorm.weight"] = (size.hidden,)
        if kind == LINEAR:
            attention = f"{prefix}.self_attn"
            common = {name: shape for name, shape in common.items() if attention not in name}
            common |= _state_shapes(size, f"{prefix}.linear_attn")
        else:
            # Each query has a gate beside it.
            queries = 2 * size.heads * size.head_dim
            common[f"{prefix}.self_attn.q_proj.weight"] = (queries, size.hidden)
            common[f"{prefix}.self_attn.q_norm.weight"] = (size.head_dim,)
            common[f"{prefix}.self_attn.k_norm.weight"] = (size.head_dim,)
        if layer == size.layers - 1:
            common = {name: shape for name, shape in common.items() if ".mlp." not in name}
            common |= _expert_shapes(size, f"{prefix}.mlp")
        shapes |= common
    return shapes


def _state_shapes(size: ModelSize, prefix: str) -> dict[str, tuple[int, ...]]:
    width = STATE_HEADS * STATE_DIM
    return {
        f"{prefix}.in_proj_qkvz.weight": (4 * width, size.hidden),
        f"{prefix}.in_proj_ba.weight": (2 * STATE_HEADS, size.hidden),
        f"{prefix}.conv1d.weight": (3 * width, 1, KERNEL),
        f"{prefix}.dt_bias": (STATE_HEADS,),
        f"{prefix}.A_log": (STATE_HEADS,),
        f"{prefix}.norm.weight": (STATE_DIM,),
        f"{prefix}.out_proj.weight": (size.hidden, width),
    }


def _expert_shapes(size: ModelSize, prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.gate.weight": (EXPERTS, size.hidden),
        f"{prefix}.shared_expert_gate.weight": (1, size.hidden),
    }
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_expert"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{prefix}.{expert}.{name}.weight"] = (size.hidden, size.hidden)
    return shapes
