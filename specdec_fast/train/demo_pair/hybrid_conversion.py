"""Converts the trained Llama target of the demo pair into a hybrid model, where most attention becomes a delta rule.

Tests: tests/train/demo_pair/test_hybrid_conversion.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

# forgetting per token of a layer's first and last head at the start; heads between are spaced evenly on a log scale
DECAYS = 0.03, 0.5
SMALL = 0.25  # size at which SiLU is nearly linear
GATE = 4.0  # input of an output gate that starts open


@dataclass(frozen=True, slots=True)
class Sizes:
    """What attention in the layers of a Llama does with a text.

    Attributes:
        mean: Mean input of each layer's attention, [C].
        size: Root mean square of "q", "k", "v" and "o", the input of the output projection, by layer and letter.
    """

    mean: dict[int, Tensor] = field(default_factory=dict)
    size: dict[tuple[int, str], float] = field(default_factory=dict)


@torch.no_grad()
def measure_attention(llama: LlamaForCausalLM, ids: Tensor) -> Sizes:
    """Measures the attention of a Llama in a text, int64 [B, T]."""
    found = Sizes()

    def note(layer: int, letter: str) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            seen = args[0] if letter == "o" else output
            found.size[layer, letter] = float(seen.float().square().mean().sqrt())
            if letter == "q":
                found.mean[layer] = args[0].float().mean((0, 1))

        return see

    hooks = [
        getattr(layer.self_attn, f"{letter}_proj").register_forward_hook(note(index, letter))
        for index, layer in enumerate(llama.model.layers)
        for letter in "qkvo"
    ]
    try:
        llama.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def convert(llama: LlamaForCausalLM, hybrid: Qwen3_5ForCausalLM, ids: Tensor) -> None:
    """Initialises a hybrid model with the weights of a Llama of the same sizes, in place.

    Embeddings, MLPs and norms are copied. Attention that stays attention is copied too. Its output gate starts at one
    half, so `o_proj` is doubled. Its norms of queries and keys give them the size that they have in the Llama.

    A delta rule starts with the keys, values, mean queries and outputs of the attention that it replaces. Each head is
    normed later, so queries, keys and values may be small, where SiLU is nearly linear. Output gates start open: they
    see the mean input of the layer.

    Args:
        llama: The trained model.
        hybrid: The hybrid model, which is changed in place.
        ids: Text in which the attention is measured, int64 [B, T].

    Source:
        Wang et al. 2024, "The Mamba in the Llama" (arXiv:2408.15237), section 3, which starts a linear recurrence with
        the matrices of attention.
    """
    seen = measure_attention(llama, ids)
    hybrid.model.embed_tokens.load_state_dict(llama.model.embed_tokens.state_dict())
    _copy_norm(llama.model.norm, hybrid.model.norm)
    for index, (old, new) in enumerate(zip(llama.model.layers, hybrid.model.layers, strict=True)):
        new.mlp.load_state_dict(old.mlp.state_dict())
        _copy_norm(old.input_layernorm, new.input_layernorm)
        _copy_norm(old.post_attention_layernorm, new.post_attention_layernorm)
        sizes = {letter: seen.size[index, letter] for letter in "qkvo"}
        if hasattr(new, "self_attn"):
            _keep_attention(old.self_attn, new.self_attn, sizes)
        else:
            _replace_attention(old.self_attn, new.linear_attn, sizes, seen.mean[index])


def _copy_norm(old: Any, new: Any) -> None:
    """Copies a norm. The new kind multiplies by 1 + weight."""
    new.weight.copy_(old.weight - 1.0)


def _keep_attention(old: Any, new: Any, sizes: dict[str, float]) -> None:
    """Copies attention. Query rows of the new kind are followed by the rows of their gate, for each head."""
    size = new.head_dim
    queries = new.q_proj.weight.view(-1, 2, size, new.q_proj.in_features)
    queries[:, 0].copy_(old.q_proj.weight.view(-1, size, old.q_proj.in_features))
    queries[:, 1].zero_()
    new.k_proj.weight.copy_(old.k_proj.weight)
    new.v_proj.weight.copy_(old.v_proj.weight)
    new.o_proj.weight.copy_(2.0 * old.o_proj.weight)
    new.q_norm.weight.fill_(sizes["q"] - 1.0)
    new.k_norm.weight.fill_(sizes["k"] - 1.0)


def _replace_attention(old: Any, new: Any, sizes: dict[str, float], mean: Tensor) -> None:
    """Starts a delta rule whose heads are the key-value heads of the attention."""
    heads, size = new.num_k_heads, new.head_k_dim
    width = old.q_proj.in_features
    queries = old.q_proj.weight.view(heads, -1, size, width).mean(1).reshape(-1, width)
    parts = {"q": queries, "k": old.k_proj.weight, "v": old.v_proj.weight}
    new.in_proj_qkv.weight.copy_(torch.cat([SMALL / sizes[letter] * part for letter, part in parts.items()]))
    new.in_proj_z.weight.copy_((GATE * mean / mean.square().sum()).expand_as(new.in_proj_z.weight))
    outputs = old.o_proj.weight.view(width, heads, -1, size).sum(2).reshape(width, -1)
    new.out_proj.weight.copy_(sizes["o"] / functional.silu(torch.tensor(GATE)) * outputs)
    new.conv1d.weight.zero_()
    new.conv1d.weight[..., -1] = 1.0  # each token alone
    new.in_proj_a.weight.zero_()
    new.in_proj_b.weight.zero_()
    new.A_log.zero_()
    new.dt_bias.copy_(_before_softplus(torch.logspace(math.log10(DECAYS[0]), math.log10(DECAYS[1]), heads)))


def _before_softplus(values: Tensor) -> Tensor:
    return torch.log(torch.expm1(values))
