"""Tiny random models of all causal language models in transformers, built offline from small configurations."""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 16
"""Window, chunk or local span of every architecture that has one."""
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("head_dim", "global_head_dim", "q_lora_rank", "kv_lora_rank", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("n_group", "topk_group", "encoder_layers", "first_k_dense_replace", "num_shared_experts"), 1),
    "v_head_dim": 12,
    "expand_size": 16,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "tie_word_embeddings": False,
}
_OFTEN_NONE = ("q_lora_rank", "num_nextn_predict_layers", "n_inner")


def model_types() -> list[str]:
    """Returns the model types of transformers that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _shrunken(config: Any) -> Any:
    """A configuration of the same class with small sizes."""
    fields = config.to_dict()
    given = {
        name: value
        for name, value in _SIZES.items()
        if (name in fields or name in config.attribute_map)
        and not (name in _OFTEN_NONE and fields.get(name, 0) is None)
    }
    given |= {name: None for name in ("layer_types", "mlp_layer_types") if isinstance(fields.get(name), list)}
    if "kv_lora_rank" in given:  # latent attention has no grouped heads
        given["num_key_value_heads"] = 4
        given.pop("head_dim", None)
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            given[name] = _shrunken(part).to_dict()
    return type(config)(**given)


def tiny_architecture(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Builds a random model, always the same one.

    Args:
        model_type: A type of `model_types`.
        dtype: Dtype of the model.
        **changes: Fields of its text configuration.

    Returns:
        The model in evaluation mode. Its weights let context affect the logits.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = _shrunken(CONFIG_MAPPING[model_type]())
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "sink" in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model.to(dtype)
