"""What the header of a GGUF file says and transformers' loader leaves out: added to the configuration, or refused.

Sources: keys of GGUF as the package `gguf` names them; rotary factors as llama.cpp's converter writes them.
Tests: tests/loading/test_gguf_config.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from specdec_fast.loading.gguf_reader import architecture_of, gguf_value

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are no weights."""

_REFUSED = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv")
"""Values that change what a model computes, and that no configuration takes from a header."""

_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_WINDOWED = ("phi3", "starcoder2")
"""Model types with a window that the loader leaves out."""
_WIDE_GEMMAS = {("gemma2", 46), ("gemma3_text", 62)}
"""Model type and layers of the Gemmas whose scores are scaled by the width of the model per head (the 27B ones)."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def complete_config(config: Any, reader: Any) -> None:
    """Completes the configuration that transformers made of a GGUF header, in place.

    Args:
        config: The configuration.
        reader: The reader of the file.

    Raises:
        ValueError: If the header asks for something that the configuration cannot express.
    """
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_attention_heads"):
        return  # an encoder-decoder or a recurrent model: refused later, for a better reason
    prefix = architecture_of(reader)

    def value(key: str) -> Any:
        return gguf_value(reader, f"{prefix}.{key}")

    width, values = value("attention.key_length"), value("attention.value_length")
    if width is not None and not hasattr(config, "global_head_dim"):  # which is then the width in the header
        if width != _head_dim(config):
            _set(config, "head_dim", width, "attention.key_length")
        if values not in (None, width):
            raise ValueError(_left_out("attention.value_length", values))
    for key, name in _SOFTCAPS.items():
        if (cap := value(key)) is not None and not _is_near(getattr(config, name, None), cap):
            _set(config, name, cap, key)
    window = value("attention.sliding_window")
    if window and getattr(config, "sliding_window", None) != window:
        if config.model_type not in _WINDOWED:
            raise ValueError(_left_out("attention.sliding_window", window))
        config.sliding_window = window
    for key in _REFUSED:
        if (found := value(key)) not in (None, 0) and not _is_near(found, 1):
            raise ValueError(_left_out(key, found))
    if (config.model_type, config.num_hidden_layers) in _WIDE_GEMMAS:
        config.query_pre_attn_scalar = config.hidden_size / config.num_attention_heads
    _complete_rope(config, reader, value)


def _complete_rope(config: Any, reader: Any, value: Any) -> None:
    """Adds base and scaling of rotary positions. Raises ValueError."""
    rope = getattr(config, "rope_parameters", None)
    kind = value("rope.scaling.type")
    factors = next((tensor for tensor in reader.tensors if tensor.name in _FACTORS), None)
    if not isinstance(rope, dict):
        if factors is not None or kind not in (None, "none"):
            raise ValueError(_left_out("rope.scaling.type", kind))
        return
    own = rope.get("full_attention", rope)  # layers with a window keep theirs
    if (base := value("rope.freq_base")) is not None and not _is_near(own.get("rope_theta"), base):
        own["rope_theta"] = float(base)
    rotated = value("rope.dimension_count")
    if rotated not in (None, getattr(config, "rotary_dim", None), _head_dim(config)):
        if "partial_rotary_factor" not in own and not hasattr(config, "partial_rotary_factor"):
            raise ValueError(_left_out("rope.dimension_count", rotated))
        own["partial_rotary_factor"] = rotated / _head_dim(config)
    factor = value("rope.scaling.factor")
    if kind == "linear" and factor:
        own.update(rope_type="linear", factor=float(factor))
    elif kind == "yarn" and factor:
        length = value("rope.scaling.original_context_length")
        own.update(rope_type="yarn", factor=float(factor))
        if length:
            own["original_max_position_embeddings"] = int(length)
        if (scale := value("rope.scaling.attn_factor")) is not None:
            own["attention_factor"] = float(scale)
    elif kind not in (None, "none"):
        raise ValueError(_left_out("rope.scaling.type", kind))
    if factors is None:
        return
    given = torch.tensor(factors.data.tolist(), dtype=torch.float64).flatten()
    found = {"rope_type": "llama3", "factor": float(given.max()), **_LLAMA3}
    if factors.name != _FACTORS[0] or not torch.allclose(_llama3_factors(own, found, given), given, rtol=1e-3):
        raise ValueError(_left_out("tensor", factors.name))
    own.update(found)


def _llama3_factors(own: dict[str, Any], scaling: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    # Source: the code of the Llama 3.1 release. llama.cpp's converter stores these divisors of rotary frequencies.
    steps = torch.arange(len(like), dtype=torch.float64) / len(like)
    length = 2 * math.pi * own["rope_theta"] ** steps  # of a wave, in tokens
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / length - low) / (high - low)
    return 1 / ((1 - smooth.clamp(0, 1)) / scaling["factor"] + smooth.clamp(0, 1))


def check_all_weights_used(model: Any, reader: Any) -> None:
    """Checks that a model has as many weights as its GGUF file.

    Args:
        model: The model that transformers made of the file.
        reader: The reader of the file.

    Raises:
        ValueError: If the file has more, which transformers leaves out without a word.
    """
    layers = model.config.get_text_config().num_hidden_layers
    used = [tensor for tensor in reader.tensors if not _is_extra(tensor.name, layers)]
    stored = sum(int(tensor.n_elements) for tensor in used)
    weights = {id(each): each for each in model.state_dict(keep_vars=True).values()}  # shared ones count once
    held = sum(each.numel() for each in weights.values())
    if stored > held:
        odd = sorted({tensor.name.split(".", 2)[-1] for tensor in used if tensor.name.endswith(".bias")})
        also = f", such as {', '.join(odd[:3])}" if odd else ""
        raise ValueError(
            f"{stored - held} of its {stored} weights have no place in transformers' {type(model).__name__}{also}, so "
            "the text would be another model's; use the original checkpoint (config.json and safetensors)"
        )


def _is_extra(name: str, layers: int) -> bool:
    """Whether a tensor is no weight of the decoder: rotary factors, and layers that predict further tokens."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return name in _FACTORS or (block.isdigit() and int(block) >= layers)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _is_near(found: Any, expected: float) -> bool:
    return isinstance(found, (int, float)) and math.isclose(found, expected, rel_tol=1e-5)


def _set(config: Any, name: str, value: Any, key: str) -> None:
    """Sets a field that the configuration has. Raises ValueError if it has none."""
    if not hasattr(config, name):
        raise ValueError(_left_out(key, value))
    setattr(config, name, value)


def _left_out(key: str, value: Any) -> str:
    """The message about a value of the header that no configuration takes."""
    return (
        f"its header has {key} = {value!r}, which transformers' loader leaves out, so the text would be another "
        "model's; use the original checkpoint (config.json and safetensors)"
    )
