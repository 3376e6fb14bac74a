"""Tiny heads with random weights for the tiny models, written as their producers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, DIM = 64, 96, 96, 4, 2, 16
KEPT = [*range(40), *range(50, 74)]  # the vocabulary of a reduced EAGLE-3 head
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}


def _random(seed: int) -> Any:
    source = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * columns**-0.5

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=source)

    return matrix, norm


def layer(prefix: str, wide: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the tensors of one Llama layer; wide: multiple of the hidden size that its attention reads."""
    matrix, norm = _random(seed)
    return {
        f"{prefix}self_attn.q_proj.weight": matrix(HEADS * DIM, wide * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * DIM, wide * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * DIM, wide * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": norm(HIDDEN),
    }


def eagle_tensors(seed: int = 0, bias: bool = True) -> dict[str, torch.Tensor]:
    """Returns the keys of yuhuili/EAGLE-*: an embedding, fc and one layer without its first norm."""
    matrix, _ = _random(seed + 1)
    fc = {"fc.weight": matrix(HIDDEN, 2 * HIDDEN)} | ({"fc.bias": matrix(1, HIDDEN)[0]} if bias else {})
    return {"embed_tokens.weight": matrix(VOCAB, HIDDEN), **fc, **layer("layers.0.", 1, seed)}


def eagle3_tensors(seed: int = 0, prefix: str = "midlayer.", aux_hidden_states: int = 3) -> dict[str, torch.Tensor]:
    """Returns the keys of yuhuili/EAGLE3-*, with a vocabulary of `KEPT`."""
    matrix, norm = _random(seed + 1)
    ids = torch.tensor(KEPT)
    there = torch.zeros(VOCAB, dtype=torch.bool)
    there[ids] = True
    return {
        "d2t": ids - torch.arange(len(KEPT)),
        "t2d": there,
        "fc.weight": matrix(HIDDEN, aux_hidden_states * HIDDEN),
        f"{prefix}input_layernorm.weight": norm(HIDDEN),
        f"{prefix}hidden_norm.weight": norm(HIDDEN),
        **layer(prefix, 2, seed),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": 3 * matrix(len(KEPT), HIDDEN),
    }


def mtp_tensors(layout: str = "deepseek", num_layers: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns a module of multi-token prediction for a Llama target with this many layers, by a producer's keys."""
    matrix, norm = _random(seed + 1)
    own = {
        "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    }[layout]
    outer = {"deepseek": f"model.layers.{num_layers}.", "qwen": "mtp.", "mimo": "model.mtp_layers.0."}[layout]
    inner = "mtp.layers.0." if layout == "qwen" else outer
    return {
        f"{outer}{own[0]}.weight": norm(HIDDEN),
        f"{outer}{own[1]}.weight": norm(HIDDEN),
        f"{outer}{own[2]}.weight": matrix(HIDDEN, 2 * HIDDEN),
        f"{inner}input_layernorm.weight": norm(HIDDEN),
        **layer(inner, 1, seed),
        f"{outer}{own[3]}.weight": norm(HIDDEN),
    }


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "model.safetensors"
) -> Path:
    """Writes a checkpoint folder; .bin files are pickled as in torch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    return folder


def options(name: str, folder: Path) -> dict[str, Any]:
    """Writes a tiny head for any of the tiny models below `folder`, and returns the options that open it."""
    if name == "eagle":
        config = {key: value for key, value in LAYER.items() if key != "head_dim"}
        return {"head": str(write(folder / name, config, eagle_tensors(), "pytorch_model.bin"))}
    if name == "mtp":
        config = {**LAYER, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
        return {"head": str(write(folder / name, config, mtp_tensors()))}
    config = {**LAYER, "draft_vocab_size": len(KEPT)}
    return {"head": str(write(folder / name, config, eagle3_tensors())), "layers": (0, 1, 1)}
