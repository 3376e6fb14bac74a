"""What a GGUF header says and transformers' loader leaves out: it is added to the configuration, or refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.gguf_files import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_fast.loading import load_model
from specdec_fast.targets.tiny_models import tiny_model

pytest.importorskip("gguf")
IDS = torch.arange(60)[None]


def llama3_divisors(theta: float, factor: float, count: int, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """Divisors of rotary frequencies, by the cases of the Llama 3.1 release."""
    found = []
    for index in range(count):
        length = 2 * math.pi * theta ** (index / count)
        if length < 8192 / high:
            found.append(1.0)
        elif length > 8192 / low:
            found.append(factor)
        else:
            smooth = (8192 / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def scaled(rope: dict[str, Any], family: str = "llama") -> Any:
    return tiny_model(family, rope_parameters={"rope_theta": 500000.0, **rope}, max_position_embeddings=512)


def same(path: Path, model: Any) -> bool:
    """Whether a file loads as a model of the same function."""
    return torch.allclose(load_model(path)(IDS).logits, model(IDS).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_factors_of_llama_3(factor: float, tmp_path: Path) -> None:
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = scaled({"rope_type": "llama3", "factor": factor, **rope})
    divisors = llama3_divisors(500000.0, factor, 8)
    path = write_gguf(tmp_path / "x.gguf", model, tensors={"rope_freqs.weight": divisors})
    assert same(path, model)
    other = write_gguf(tmp_path / "y.gguf", model, tensors={"rope_freqs.weight": divisors**2})
    with pytest.raises(
        ValueError, match=r"model: got '.*y.gguf': its header has tensor = 'rope_freqs.weight', which tra"
    ):
        load_model(other)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf")
    assert not torch.allclose(theirs(IDS).logits, model(IDS).logits, atol=1e-2), "transformers reads them by itself now"


@pytest.mark.parametrize(
    ("rope", "header"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
        ),
        ({"rope_type": "default"}, {"type": "none"}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scaled_rotary_positions(family: str, rope: dict[str, Any], header: dict[str, Any], tmp_path: Path) -> None:
    model = scaled(rope, family)
    values = {f"rope.scaling.{name}": value for name, value in header.items()}
    assert same(write_gguf(tmp_path / "x.gguf", model, header=values), model)


def gemma(**overrides: Any) -> Any:
    """A Gemma 3 with layers of both kinds."""
    own = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 24, "query_pre_attn_scalar": 256}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3_text", **own, eos_token_id=0, **overrides)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def test_scaled_layers_of_gemma_3(tmp_path: Path) -> None:
    """Layers with a window keep their positions."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    model = gemma(rope_parameters={"full_attention": full, "sliding_attention": plain})
    header = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert same(write_gguf(tmp_path / "x.gguf", model, header=header), model)


def test_heads_of_another_width(tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=32)
    assert same(write_gguf(tmp_path / "x.gguf", model), model)


def test_a_window_that_the_model_knows(tmp_path: Path) -> None:
    own = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 24, "eos_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("starcoder2", **own, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    path = write_gguf(tmp_path / "x.gguf", model)
    assert load_model(path).config.sliding_window == 24 and same(path, model)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ({"attention.sliding_window": 24}, "attention.sliding_window = 24"),
        ({"logit_scale": 0.25}, "logit_scale = 0.25"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ],
)
def test_values_without_a_place_are_refused(header: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_model("llama"), header=header)
    with pytest.raises(
        ValueError, match=rf"model: got '.*x.gguf': its header has {key}, which .*; use the original che"
    ):
        load_model(path)


def test_neutral_values_pass(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert same(write_gguf(tmp_path / "x.gguf", model, header={"logit_scale": 1.0, "expert_count": 0}), model)


def test_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    bias = {f"blk.{layer}.attn_q.bias": np.ones(64, dtype=np.float32) for layer in range(2)}
    path = write_gguf(tmp_path / "x.gguf", tiny_model("llama"), tensors=bias)
    words = "128 of its .* weights have no place in transformers' LlamaForCausalLM, such as attn_q.bias, so"
    with pytest.raises(ValueError, match=rf"model: got '.*x.gguf': {words}"):
        load_model(path)
    ahead = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), dtype=np.float32)}
    assert same(write_gguf(tmp_path / "y.gguf", tiny_model("llama"), tensors=ahead), tiny_model("llama"))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "x.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    with pytest.raises(ValueError, match=r"the weights lack 1 tensors .*layers.1.mlp.up_proj.weight"):
        load_model(path)
