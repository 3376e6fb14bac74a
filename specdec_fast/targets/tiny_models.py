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
        family: A family of `FAMILIES`.
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

    if family not in FAMILIES:
        raise ValueError(unknown_name("tiny model family", family, sorted(FAMILIES)))
    model_type, extra = FAMILIES[family]
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


@torch.no_grad()
def _scale_logits(model: PreTrainedModel, std: float) -> None:
    """Scales the projection to a standard deviation of the logits."""
    vocab = model.config.get_text_config().vocab_size
    probe = torch.randint(0, vocab, (2, 64))
    for _ in range(6):  # a final softcap makes the scale non-linear, so it takes a few rounds
        head = model.get_output_embeddings().weight
        head.mul_((std / model(probe, use_cache=False).logits.std()).clamp(max=8.0))
