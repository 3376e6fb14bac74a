"""The models that packed passes can serve, by class, configuration and placement of weights.

Tests: tests/targets/test_model_support.py, tests/targets/test_architectures.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from specdec_fast.targets.quantized_layers import why_tokens_depend
from specdec_fast.targets.recurrent_layers import KINDS, find_mixers, why_not_served
from specdec_fast.targets.sharding import is_tensor_parallel, sharded_weights

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
RECURRENT_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "hybrid", "moe", "mlp")


class UnsupportedModelError(ValueError):
    """A model that packed passes cannot serve. The message says why, and what to do."""


def check_supported(model: Any) -> None:
    """Checks what a model's class, configuration and weights say about packed passes.

    Args:
        model: A transformers model.

    Raises:
        UnsupportedModelError: If it is no causal language model of transformers, or a wrapped one, or if its weights
            are not on one device. Further, if it is an encoder-decoder, has recurrent layers that are not known, does
            not support the attention interface, or has scales of activations that depend on the whole batch.
    """
    _check_class(model)
    _check_placement(model)
    name, config = type(model).__name__, model.config.get_text_config()
    if (reason := why_tokens_depend(model)) is not None:
        raise UnsupportedModelError(f"{name}: {reason}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: got an encoder-decoder; expected a decoder-only causal model; choose one")
    has_mixers, is_stateful = bool(find_mixers(model)), getattr(model, "_is_stateful", False)
    if is_stateful and (reason := why_not_served(model)) is not None:
        raise UnsupportedModelError(f"{name}: {reason}; choose another model")
    if is_stateful and not has_mixers:
        raise UnsupportedModelError(
            f"{name}: got a model with recurrent state{_first_block(model)}, but no mixer that is known; expected "
            f"attention layers, or mixers of these kinds: {', '.join(KINDS)}; choose another model"
        )
    if not has_mixers and not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name}: does not support transformers' attention interface; expected a model whose attention goes "
            "through AttentionInterface (Llama, Qwen, Mistral, GPT-2, Gemma and most current decoders do)"
        )
    known = (*ATTENTION_LAYERS, *(RECURRENT_LAYERS if has_mixers else ()))
    odd = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in known})
    if odd:
        raise UnsupportedModelError(
            f"{name}: got layers of type {', '.join(odd)}; expected full, sliding-window or chunked attention only "
            "(packed passes compute no other mask, and cannot roll back recurrent state); choose another model"
        )


def _check_class(model: Any) -> None:
    """Refuses what is no causal language model of transformers, and names the module inside of wrappers."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inner = next((each for each in ("_orig_mod", "module", "base_model") if hasattr(model, each)), None)
        remedy = "load one with AutoModelForCausalLM.from_pretrained"
        if inner == "_orig_mod":
            remedy = "pass model._orig_mod, and compile=True"
        elif inner == "module":
            remedy = "pass model.module, if all of its weights are on one device"
        elif inner == "base_model":
            remedy = "pass model.merge_and_unload() if it is a PEFT model"
        elif isinstance(model, torch.nn.Sequential) and any(isinstance(each, PreTrainedModel) for each in model):
            remedy = "pass the model inside of it"
        raise UnsupportedModelError(f"{name}: got no model of transformers; expected a causal language model; {remedy}")
    if getattr(model.config, "is_encoder_decoder", False):
        return  # refused later, with its own reason
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name}: got a model without a projection to logits; expected a causal language model; load it with "
            "AutoModelForCausalLM (not AutoModel or a classifier)"
        )


def _check_placement(model: Any) -> None:
    """Refuses sharded weights, several devices, and weights that nothing brings into memory."""
    name, weights = type(model).__name__, list(chain(model.named_parameters(), model.named_buffers()))
    sharded = [] if is_tensor_parallel(model) else sharded_weights(model)
    if sharded or any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules()):
        raise UnsupportedModelError(
            f"{name}: got weights sharded over processes (for example {sharded[0] if sharded else 'by FSDP'}), but not "
            "by transformers' tp_plan alone; expected whole weights on one device, or such a plan; load the model "
            "without FSDP, pipeline and expert parallelism"
        )
    absent = [key for key, weight in weights if weight.device.type == "meta"]
    hooks = [hook for each in model.modules() if (hook := getattr(each, "_hf_hook", None)) is not None]
    if absent and (not hooks or model.device.type == "meta"):
        raise UnsupportedModelError(
            f"{name}: got {len(absent)} weights without memory (for example {absent[0]}); expected weights on one "
            "device, or offloaded layers behind an embedding that is not; load the model with device_map={'': 'cpu'} "
            "or {'': 'cuda:0'}, in a smaller dtype if it does not fit"
        )
    # offloaded weights come to these devices while their module runs
    runs_on = [
        each.execution_device
        for hook in hooks
        for each in getattr(hook, "hooks", [hook])
        if getattr(each, "execution_device", None) is not None
    ]
    places = {str(weight.device) for _, weight in weights if weight.device.type != "meta"}
    places |= {str(torch.device("cuda", place) if isinstance(place, int) else torch.device(place)) for place in runs_on}
    if len(places) > 1:
        raise UnsupportedModelError(
            f"{name}: got layers on {', '.join(sorted(places))}; expected one device, where the cache is; load "
            f"it with device_map={{'': '{max(places)}'}}"
        )


def _first_block(model: torch.nn.Module) -> str:
    """Returns the class and the name of a model's first block, in words, for models of one kind of block."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return f" in {type(module[0]).__name__} at {name + '.0'!r}"
    return ""
