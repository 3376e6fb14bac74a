"""Small GGUF files: a transformers model and its byte-level tokenizer, as llama.cpp's converter would store them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "starcoder2": "starcoder2",
}
"""Model type of transformers -> architecture in a GGUF file."""


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any = None,
    *,
    kind: str = "F32",
    header: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """Writes a model.

    Args:
        path: The file.
        model: A transformers model of a type in `ARCHITECTURES`.
        tokenizer: The tokenizer of `toy_tokenizer.byte_tokenizer`, or None for tokens without a text.
        kind: Type of the matrices: F32, F16, Q8_0, ...
        header: Further values by name; those without a dot in front belong to the architecture.
        tensors: Further tensors by name.
        architecture: Another architecture for the header.
    """
    import gguf

    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture or arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(head_dim)
    if arch in ("gemma3", "starcoder2"):
        writer.add_sliding_window(config.sliding_window)
    for name, value in (header or {}).items():
        _add(
            writer,
            name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture or arch}.{name}",
            value,
        )
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    stored: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) in stored:  # tied to the embedding
            continue
        stored.add(id(weight))
        values = weight.detach().float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        base, _, last = name.rpartition(".")
        place = f"{names.get_name(base)}.{last}"
        wanted = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(place, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    for place, values in (tensors or {}).items():
        writer.add_tensor(place, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, value: Any) -> None:
    """Adds a value by its Python type."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def _write_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Adds the vocabulary, padded to the rows of the embedding, and the tokenizer's chat template."""
    writer.add_tokenizer_model("gpt2")
    names: list[str] = [] if tokenizer is None else sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set() if tokenizer is None else set(tokenizer.all_special_tokens)
    kinds = [3 if name in special else 1 for name in names]
    padding = [f"[PAD{index}]" for index in range(vocab_size - len(names))]
    writer.add_token_list([*names, *padding])
    writer.add_token_types([*kinds, *[5] * len(padding)])
    if tokenizer is None:
        return
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_add_bos_token(True)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
