"""What an attached model cannot do itself, in words: arguments of `generate`, layouts of prompts, processors.

Tests: tests/integrations/transformers/test_refusals.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REMEDY = "pass fallback='transformers' to attach, so that transformers runs such calls, or call detach(model) first"
ATTACH_AGAIN = (
    "call detach(model), then attach(model) again, or pass fallback='transformers' to attach, so that transformers "
    "runs such calls"
)
"""Remedy for a model whose parts were replaced."""
CACHES = "past_key_values", "cache", "cache_params"
"""Arguments that bring a cache; since transformers 5.24, `cache` is the name of the first."""
OTHER_METHODS = "_beam_search", "_assisted_decoding"
"""Methods of transformers that decode in another way."""
_OTHER_SPECULATION = "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type"
"""Arguments of `generate` that ask for speculation of transformers."""
_HARMLESS = {
    "attention_mask",
    "position_ids",  # compared below
    "cache_position",
    "logits_to_keep",
    "output_attentions",  # of no effect unless dictionaries are returned
    "output_hidden_states",
    "return_dict",
    "tokenizer",
    "use_cache",
}
"""Arguments of the model's forward that change no token, or that are read here."""
_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model a second time (guidance_scale)",
    "ClassifierFreeGuidanceLogitsProcessor": "combines rows of the batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "combines rows of the batch",
    "SynthIDTextWatermarkLogitsProcessor": "keeps a state between calls",
    "WhisperTimeStampLogitsProcessor": "keeps a state between calls",
    "WhisperNoSpeechDetection": "keeps a state between calls",
}
"""Logits processors of transformers that are no functions of one text and its scores."""


class RefusedCallError(ValueError):
    """A call of `generate` that an attached model cannot serve. The message says what was got, expected, and a way."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(f"generate: got {reason}; {remedy}")
        self.reason = reason


class HandedOnError(Exception):
    """A call that transformers shall run as a whole."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def why_not_method(method: str, prepared: Mapping[str, Any]) -> str:
    """Returns what was got and expected, for a method of transformers that decodes in another way.

    Args:
        method: One of `OTHER_METHODS`.
        prepared: Its arguments by name.
    """
    if method == "_beam_search":
        return "beam search (num_beams); expected greedy decoding or sampling, num_beams=1"
    config = prepared.get("generation_config")
    values = {name: prepared.get(name, getattr(config, name, None)) for name in _OTHER_SPECULATION}
    found = [name for name, value in values.items() if value is not None]
    return f"{' and '.join(found) or 'assisted decoding'}; expected none, because the attached model speculates itself"


def why_not_whole_call(given: Mapping[str, Any]) -> str | None:
    """Returns why a call is refused before transformers prepares it, or None.

    Args:
        given: The arguments of `generate`, by name.
    """
    if given.get("custom_generate") is not None:
        return "custom_generate, a decoding loop of its own; expected none"
    if given.get("cache_implementation") == "paged":
        return "cache_implementation='paged', which batches on its own; expected none"
    return None


def why_not_arguments(config: Any, synced_gpus: bool, model_kwargs: Mapping[str, Any]) -> str | None:
    """Returns why prepared arguments are refused, or None.

    Args:
        config: The prepared generation config.
        synced_gpus: Whether GPUs take the same number of steps.
        model_kwargs: What transformers would pass to the model's forward.
    """
    if synced_gpus:
        return "synced_gpus=True; expected False"
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                return f"{name}=True; expected False, because packed passes have none to return"
    if config.cache_implementation == "quantized":
        return "cache_implementation='quantized', which rounds keys and values; expected none"
    for name in CACHES:
        if model_kwargs.get(name) is not None:
            shown = "a cache (past_key_values)" if name == "cache" else name
            return f"{shown}; expected none, because the engine keeps and shares the keys of earlier prompts itself"
    if model_kwargs.get("inputs_embeds") is not None:
        return "inputs_embeds; expected input_ids"
    for name, value in model_kwargs.items():
        if value is not None and name not in _HARMLESS:
            return f"{name}, an input of the model besides tokens; expected input_ids and attention_mask alone"
    return None


def why_not_prompts(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> str | None:
    """Returns why prompts are refused, or None.

    Args:
        input_ids: Prompts, int64 [B, n].
        mask: Attention mask [B, n], or None for all tokens.
        positions: Position ids [B, n] or [1, n], or None for those that follow from the mask.
    """
    if input_ids.shape[1] == 0:
        return "prompts without a token; expected at least one token in each"
    if mask is None and positions is None:
        return None
    shown = torch.ones_like(input_ids) if mask is None else mask
    if shown.shape != input_ids.shape:
        return f"an attention_mask of shape {[*shown.shape]}; expected that of input_ids, {[*input_ids.shape]}"
    if bool(((shown != 0) & (shown != 1)).any()):
        return "an attention_mask with values between; expected 0 and 1"
    if bool((shown[:, -1] == 0).any()):
        return "prompts that end with padding; expected padding on the left (tokenizer.padding_side = 'left')"
    if positions is not None:
        usual = (shown.long().cumsum(-1) - 1).to(positions.device)
        if positions.shape[-1] != usual.shape[-1] or bool(((positions != usual) & (shown != 0)).any()):
            return "position_ids of its own; expected none, or those that follow from the attention_mask"
    return None


def why_not_processor(processor: Any) -> str | None:
    """Returns why a logits processor of transformers is refused, or None."""
    for kind in type(processor).__mro__:
        if kind.__name__ in _PROCESSORS and is_of_transformers(kind):
            return f"{type(processor).__name__}, which {_PROCESSORS[kind.__name__]}; expected a function of one text"
    return None


def is_of_transformers(kind: type) -> bool:
    """Returns whether a class comes with transformers."""
    return kind.__module__.partition(".")[0] == "transformers"


def why_not_length(longest: int, limit: int, own_limit: int | None) -> str | None:
    """Returns why a text of a given length is refused, or None.

    Args:
        longest: Tokens of the longest prompt and all tokens that may follow.
        limit: Tokens that the engine can hold in a request.
        own_limit: The model's own limit, or None.
    """
    if longest <= limit:
        return None
    way = "pass max_length to attach" if own_limit is None or limit < own_limit else "pass a smaller max_new_tokens"
    return f"up to {longest} tokens of prompt and text; expected at most {limit} ({way})"
