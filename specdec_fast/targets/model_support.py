"""The models that packed passes can serve, by class and configuration. Tests: tests/targets/test_architectures.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PINNED_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest position of the batch
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")


class UnsupportedModelError(ValueError):
    """A model that packed passes cannot serve. The message says why, and what to do."""


def check_supported(model: PreTrainedModel) -> None:
    """Checks what a model's class and configuration say about packed passes.

    Args:
        model: A transformers model.

    Raises:
        UnsupportedModelError: If the model is an encoder-decoder, has recurrent layers, does not support the attention
            interface, or has rotary frequencies that depend on the whole batch.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: got an encoder-decoder; expected a decoder-only causal model; choose one")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name}: got a model with recurrent state; expected attention layers only, since that state cannot be "
            "rolled back by forgetting slots; choose another model"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name}: does not support transformers' attention interface; expected a model whose attention goes "
            "through AttentionInterface (Llama, Qwen, Mistral, GPT-2, Gemma and most current decoders do)"
        )
    odd = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in ATTENTION_LAYERS})
    if odd:
        raise UnsupportedModelError(
            f"{name}: got layers of type {', '.join(odd)}; expected full or sliding-window attention only (recurrent "
            "state could not be rolled back by forgetting slots); choose another model"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for entry in nested:
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind in PINNED_ROPE:
            raise UnsupportedModelError(
                f"{name}: got rotary scaling '{kind}', whose frequencies depend on the longest row of a batch, so a "
                "row's text would depend on its neighbours; set config.rope_parameters to a fixed type (default, "
                "linear, llama3, yarn) before loading"
            )
