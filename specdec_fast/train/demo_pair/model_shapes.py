"""Sizes of the demo pair's Llama models and of its hybrid target, and functions that build and grow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a small Llama; `build` fixes everything else."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 1024
    context: int = 2048
    head_dim: int = 64


# The target has many thin layers: at batch 1 each has a fixed cost, which a shallow draft does not pay.
TARGET = Shape(layers=12, hidden=256, heads=4, kv_heads=2, inner=448)
DRAFT = Shape(layers=1, hidden=192, heads=3, kv_heads=3, inner=384)
# Layers of the hybrid target with attention; the others have a gated delta rule.
ATTENTION_EVERY = 4


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch inside the context, and leaves its generator as it was."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def build(shape: Shape, seed: int, end_id: int = 0) -> LlamaForCausalLM:
    """Builds a randomly initialised float32 Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        attention_dropout=0.0,
    )
    with _seeded(seed):
        return LlamaForCausalLM(config).float()


def build_hybrid(shape: Shape, seed: int, end_id: int = 0) -> Qwen3_5ForCausalLM:
    """Builds a randomly initialised float32 hybrid model with the sizes of a Llama and tied embeddings.

    Args:
        shape: Sizes of the Llama. Its key-value heads are the heads of the gated delta rules.
        seed: Seed of the weights.
        end_id: Token that ends a text.

    Returns:
        The model. Every fourth layer has attention, and the others a gated delta rule.
    """
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.kv_heads,
        linear_num_value_heads=shape.kv_heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        linear_conv_kernel_dim=4,
        layer_types=[
            "linear_attention" if (index + 1) % ATTENTION_EVERY else "full_attention" for index in range(shape.layers)
        ],
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        attention_dropout=0.0,
    )
    with _seeded(seed):
        return Qwen3_5ForCausalLM(config).float()


def mixed(bfloat16: bool) -> torch.autocast:
    """Returns a context for matrix products in bfloat16, or in float32; weights and sums are always float32."""
    import torch

    return torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)


def start_quietly(model: LlamaForCausalLM) -> None:
    """Zeroes the matrices that write into the residual stream, so that every layer starts as the identity."""
    import torch

    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def grow(small: LlamaForCausalLM, large: LlamaForCausalLM) -> None:
    """Initialises a deeper model with the layers of a shallow one, each repeated in place and scaled down.

    The shallow model costs less, so it is trained on many tokens first. A layer that is repeated k times writes 1/k
    into the residual stream each time. The deeper model therefore starts near the function of the shallow one.

    Args:
        small: The trained shallow model.
        large: The deeper model, which is changed in place.

    Source:
        Chang et al. 2018 (arXiv:1710.10348) for repetition in place. Du et al. 2024 (arXiv:2405.15319) stack whole
        models.
    """
    large.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    large.model.norm.load_state_dict(small.model.norm.state_dict())
    deep, shallow = len(large.model.layers), len(small.model.layers)
    sources = [index * shallow // deep for index in range(deep)]
    for index, layer in enumerate(large.model.layers):
        layer.load_state_dict(small.model.layers[sources[index]].state_dict())
        copies = sources.count(sources[index])
        layer.self_attn.o_proj.weight.data /= copies
        layer.mlp.down_proj.weight.data /= copies
