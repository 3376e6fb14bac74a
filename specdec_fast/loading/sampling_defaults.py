"""Sampling parameters of requests without any: those of a model's generation config, given ones, or neutral ones.

Tests: tests/loading/test_sampling_defaults.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from specdec_fast.sampling.params import SamplingParams

log = logging.getLogger("specdec_fast")
EXPECTED = 'expected None, "model" or SamplingParams'

_SAME_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "max_new_tokens",
    "min_new_tokens",
)
_FILTERS = ("top_k", "top_p", "min_p")
_OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0}
_UNSUPPORTED: dict[str, Collection[Any]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "watermarking_config": (),
    "max_length": (),
    "min_length": (0,),
    "max_time": (),
}
"""Settings of texts that no field of `SamplingParams` has -> values that have no effect, besides None."""


def check_sampling(sampling: Any) -> None:
    """Checks the argument `sampling` of `load`.

    Raises:
        ValueError: For anything but None, "model" and `SamplingParams`.
    """
    if not (sampling is None or isinstance(sampling, SamplingParams) or (sampling == "model")):
        raise ValueError(f"sampling: got {sampling!r:.60}; {EXPECTED}")


def read_generation_config(config: Any, eos_ids: Collection[int] = ()) -> tuple[dict[str, Any], list[str]]:
    """Converts a generation config to fields of `SamplingParams`.

    Only what the config sets is converted. The defaults of transformers, such as greedy decoding, are left out.

    Args:
        config: A transformers `GenerationConfig`, or None.
        eos_ids: End-of-sequence ids of the model.

    Returns:
        Fields with their values, and what the config sets in vain, as "name=value".
    """
    known = {field.name for field in fields(SamplingParams)}
    given = {} if config is None else {name: value for name, value in config.to_dict().items() if value is not None}
    found = {name: given[name] for name in _SAME_NAMES if name in given and name in known}
    if found.get("top_k") == -1:  # as vLLM writes it
        found["top_k"] = 0
    if given.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name not in _FILTERS} | {"temperature": 0.0}
    ignored = [
        f"{name}={given[name]!r:.40}"
        for name, off in _UNSUPPORTED.items()
        if name in given and name not in known and given[name] not in off
    ]
    banned = [*given.get("suppress_tokens", ())]
    words, more = _split_by_length((word, True) for word in given.get("bad_words_ids", ()))
    banned += [token for token in words if token not in eos_ids]  # transformers leaves these out too
    bias, longer = _split_by_length(_bias_of(given.get("sequence_bias", ())))
    if longer:
        ignored.append("sequence_bias of several tokens")
    if more:
        found["bad_words"] = more
    if banned:
        found["banned_token_ids"] = tuple(banned)
    if bias:
        found["logit_bias"] = bias
    if given.get("stop_strings"):
        found["stop"] = given["stop_strings"]
    return {name: value for name, value in found.items() if name not in _OFF or value != _OFF[name]}, ignored


def _bias_of(given: Any) -> Iterable[tuple[Any, Any]]:
    """Pairs of tokens and bias: a mapping, or a list of lists as in JSON."""
    return given.items() if isinstance(given, Mapping) else ((tokens, bias) for tokens, bias in given)


def _split_by_length(entries: Iterable[tuple[Any, Any]]) -> tuple[dict[int, Any], tuple[tuple[int, ...], ...]]:
    """Returns the entries of single tokens, and the tokens of the others."""
    pairs = [(tuple(tokens), value) for tokens, value in entries]
    single = {tokens[0]: value for tokens, value in pairs if len(tokens) == 1}
    return single, tuple(tokens for tokens, _ in pairs if len(tokens) != 1)


def unfollowed_settings(config: Any) -> str:
    """Returns what a generation config changes in neutral sampling parameters, as "name=value, ..."; "" for nothing."""
    found, _ = read_generation_config(config)
    neutral = SamplingParams()
    return ", ".join(f"{name}={value!r:.40}" for name, value in found.items() if value != getattr(neutral, name))


def resolve_defaults(
    sampling: SamplingParams | str | None, config: Any, eos_ids: Collection[int], vocab_size: int
) -> SamplingParams:
    """Returns the sampling parameters of requests without any.

    Args:
        sampling: The argument of `load`.
        config: The model's generation config, or None.
        eos_ids: End-of-sequence ids of the model.
        vocab_size: V of the target.

    Raises:
        ValueError: If the parameters have token ids outside of the vocabulary, or if the generation config is to be
            followed and has values that cannot be.
    """
    if isinstance(sampling, SamplingParams):
        _check(sampling, eos_ids, vocab_size)
        return sampling
    if sampling is None:
        settings = unfollowed_settings(config)
        if settings:
            log.warning(
                "the model's generation_config sets %s, which requests do not follow: pass sampling='model' to load to "
                "follow it, or sampling=SamplingParams() for neutral defaults without this message",
                settings,
            )
        return SamplingParams()
    found, ignored = read_generation_config(config, eos_ids)
    if ignored:
        log.warning("the model's generation_config sets %s, which is not supported and ignored", ", ".join(ignored))
    try:
        params = SamplingParams(**found)
        _check(params, eos_ids, vocab_size)
    except ValueError as error:
        raise ValueError(
            f"sampling: got 'model', whose generation_config cannot be followed ({error}); expected valid values; "
            "change model.generation_config, or pass SamplingParams"
        ) from None
    return params


def _check(params: SamplingParams, eos_ids: Collection[int], vocab_size: int) -> None:
    params.check(vocab_size, [*(() if params.ignore_eos else eos_ids), *params.stop_token_ids])
