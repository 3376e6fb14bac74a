"""Tiny random models of many architectures, for tests, the lab, and trials without a download.

With default initialisation, logits have a standard deviation near 0.1, and everything is a near-tie. These models are
scaled to about 3. Tests: tests/targets/test_tiny_models.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec_kernels.unknown_names import unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gpt2": ("gpt2", {}),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
LONG_TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 24, "moe_layers": [],
            "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5,
        },
    ),
    "llama4_experts": (
        "llama4_text",
        {
            "num_hidden_layers": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 24,
            "no_rope_layers": [1, 1, 1, 0], "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "floor_scale": 8, "attn_scale": 0.5,
        },
    ),
}  # fmt: skip
"""Models whose layers treat long texts in ways of their own: rotary scaling, and chunks of attention."""
_DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
}  # fmt: skip
_MAMBA2 = {
    "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
HYBRID_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**_DELTA, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_next_experts": ("qwen3_next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_experts": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "kimi_linear": (
        "kimi_linear",
        {**_LATENT, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 4},
    ),
    "kimi_linear_dense": (
        "kimi_linear",
        {
            **_LATENT, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": None,
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", {**_LATENT, "num_local_experts": 4}),
    "mamba2": (
        "mamba2",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128}),
    "granite_hybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 8, "mamba_head_dim": 16,
            "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8,
            "mamba_headdim": 16, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 8, "use_mem_rope": True,
        },
    ),
    "zamba": (
        "zamba",
        {
            "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2,
            "mamba_d_state": 16,
        },
    ),
    "mamba": ("mamba", {"num_hidden_layers": 3, "state_size": 16}),
    "falcon_mamba": ("falcon_mamba", {"num_hidden_layers": 3, "state_size": 16}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
            "num_experts_per_tok": 1, "mamba_d_state": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    ),
    "lfm2_experts": (
        "lfm2_moe",
        {
            **_EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
}  # fmt: skip
"""Models with recurrent layers, one for each class of transformers that is tested."""
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    logit_std: float = 3.0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Builds a random causal LM.

    Args:
        family: A family of `FAMILIES` or `HYBRID_FAMILIES`.
        seed: Seed of the weights.
        logit_std: Standard deviation of the logits.
        dtype: Dtype of the model.
        **overrides: Fields of its configuration.

    Returns:
        The model, on the CPU.

    Raises:
        ValueError: If the family is unknown.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {**FAMILIES, **LONG_TEXT_FAMILIES, **HYBRID_FAMILIES}
    if family not in known:
        raise ValueError(unknown_name("tiny model family", family, sorted(known)))
    model_type, extra = known[family]
    settings = {**SHAPE, **extra, **overrides}
    if model_type == "gpt2":
        inner = settings.pop("intermediate_size")
        for name in ("num_key_value_heads", "head_dim"):
            settings.pop(name)
        settings = {GPT2_NAMES.get(key, key): value for key, value in settings.items()} | {"n_inner": inner}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
        _scale_layers(model)
        _scale_logits(model, logit_std)
    return model.to(dtype)


def _scale_layers(model: PreTrainedModel) -> None:
    """Gives attention and MLP weights unit gain, so that context affects the logits."""
    inputs_first = model.config.model_type == "gpt2"  # its Conv1D stores weights as [inputs, outputs]
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
            inputs = parameter.shape[0 if inputs_first and "lm_head" not in name else 1]
            torch.nn.init.normal_(parameter, std=inputs**-0.5)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 3 and "conv" in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


@torch.no_grad()
def _scale_logits(model: PreTrainedModel, std: float) -> None:
    """Scales the projection to a standard deviation of the logits."""
    vocab = model.config.get_text_config().vocab_size
    probe = torch.randint(0, vocab, (2, 64))
    for _ in range(6):  # a final softcap makes the scale non-linear, so it takes a few rounds
        head = model.get_output_embeddings().weight
        head.mul_((std / model(probe, use_cache=False).logits.std()).clamp(max=8.0))
