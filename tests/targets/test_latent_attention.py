"""Latent attention (MLA): served with expanded keys and values; what they and their latents take per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.hybrid_models import int32
from oracles.tiny_architectures import tiny_architecture

from specdec_fast import HuggingFaceTarget
from specdec_fast.targets import attention
from specdec_fast.targets.load_checks import check_calls, observe

SIZES = {
    "DeepSeek-V3": ({}, 61, 5856.0, 68.6),
    "Kimi-K2": ({"num_attention_heads": 64, "num_key_value_heads": 64}, 61, 2928.0, 68.6),
    "DeepSeek-V2-Lite": ({"num_attention_heads": 16, "num_key_value_heads": 16}, 27, 324.0, 30.4),
}
"""Changes to DeepSeek-V3's shape, layers, and KiB per token in bfloat16: expanded, and as latents."""


@pytest.mark.parametrize("name", SIZES)
def test_memory_of_a_token(name: str) -> None:
    """One layer of the real shape runs without memory, and shows what the cache would store."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    changes, layers, expanded, latent = SIZES[name]
    small: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 64, "pad_token_id": 0}
    config = DeepseekV3Config(**{**changes, **small})
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim) == (512, 64, 128)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    attention.register()
    attention.use_attention(model, attention.NAME)
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    (shape,) = check_calls(model, observe(model, tokens, tokens).calls).values()
    assert shape.key_dim == shape.value_dim == 192, "values are padded to the width of keys"
    stored = layers * shape.num_kv_heads * (shape.key_dim + shape.value_dim) * 2 / 2**10
    compressed = layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 2 / 2**10
    assert (round(stored, 1), round(compressed, 1)) == (expanded, latent)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_the_cache_has_expanded_heads(model_type: str) -> None:
    """Keys and values of each head, as the model's own module expands them."""
    model = tiny_architecture(model_type)
    heads, width = model.config.num_attention_heads, model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    target = HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert {each.shape[2:] for each in (*target.cache.keys, *target.cache.values)} == {(heads, width)}
    assert target.cache.reserve(0, 4)
    target.extend(int32(0), torch.tensor([1, 2, 3, 4]), int32(0, 4), logits=False)
    keys, values = target.cache.read(0, 0)
    assert float(keys.abs().amax(2).min()) > 0 and float(values[:, :, model.config.v_head_dim :].abs().max()) == 0
