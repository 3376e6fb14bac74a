"""From the fields of a request to `SamplingParams`. Tests: tests/server/test_parameters.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specdec_fast.engine.engine import Engine
from specdec_fast.integrations.grammars import DEFAULT_BACKEND, make_grammar
from specdec_fast.sampling.grammar import Matcher
from specdec_fast.sampling.params import SamplingParams
from specdec_fast.server.errors import APIError, UnknownModelError
from specdec_fast.server.generation import Prompt
from specdec_fast.server.schemas import GenerationRequest, ResponseFormat

NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")},
    **{name: name for name in ("skip_special_tokens", "include_stop_str_in_output")},
    **{name: name for name in ("no_repeat_ngram_size", "bad_words", "prompt_logprobs")},
    "min_tokens": "min_new_tokens",
}
"""Field of a request -> field of `SamplingParams`."""
_GREEDY_BELOW = 1e-3
"""Temperatures above 0 and below this one decode greedily, since `SamplingParams` has no such temperatures."""
_MOST_LOGPROBS = 20
_MOST_DIGITS = 10  # of a token id


def read_params(
    request: GenerationRequest,
    engine: Engine,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar_backend: str = DEFAULT_BACKEND,
) -> SamplingParams:
    """Converts the fields of a request. Those that are absent have the defaults of the engine.

    Args:
        request: The request.
        engine: The engine.
        max_tokens: Most tokens of the text.
        logprobs: Number of alternatives to report beside the log-probability of each token, or None for none.
        grammar_backend: Library that makes the grammar of a response format.

    Returns:
        The parameters of its first text.

    Raises:
        ValueError: If a value is out of range.
    """
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and not 0 <= count <= _MOST_LOGPROBS:
            field = "top_logprobs" if name == "logprobs" and hasattr(request, "top_logprobs") else name
            raise ValueError(f"{field}: got {count} alternatives; expected 0 to {_MOST_LOGPROBS}")
    if max_tokens == 0 and request.prompt_logprobs is None and not getattr(request, "echo", False):
        raise ValueError("max_tokens: got 0; expected at least 1, or 0 with prompt_logprobs, or with echo")
    if request.prompt_logprobs is not None and request.stream:
        raise ValueError("prompt_logprobs: got a stream; expected stream false, or echo with logprobs")
    if request.stream_options is not None and not request.stream:
        raise ValueError("stream_options: got options without a stream; expected stream true")
    given: dict[str, Any] = {"max_new_tokens": max_tokens, "logprobs": logprobs}
    given |= {ours: getattr(request, name) for name, ours in NAMES.items() if getattr(request, name) is not None}
    if 0 < given.get("temperature", 0) < _GREEDY_BELOW:  # what clients send that may not send 0
        given["temperature"] = 0.0
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(name): value for name, value in request.logit_bias.items()}
    given["grammar"] = _read_grammar(request.response_format, engine.tokenizer, grammar_backend)
    return replace(engine.default_params, **given).with_bad_word_ids(engine.tokenizer)


def repeat(request: GenerationRequest, tokens: Sequence[int], params: SamplingParams) -> Prompt:
    """Returns a prompt with the parameters of its `n` texts.

    The first text has the seed of the request, and alone scores the prompt. The seeds of the others are functions of
    that seed, of the prompt and of the number of the text.

    Args:
        request: The request.
        tokens: Token ids of the prompt.
        params: Parameters of the first text.

    Raises:
        ValueError: If n is not positive.
    """
    count = 1 if request.n is None else request.n
    if count < 1:
        raise ValueError(f"n: got {count}; expected at least 1")
    rest = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
    others = [rest if rest.seed is None else rest.with_derived_seed(tokens, at) for at in range(1, count)]
    return Prompt(list(tokens), [params, *others], request.cache_salt)


def check_model(request: GenerationRequest, served: str) -> None:
    """Checks the name of the model.

    Raises:
        UnknownModelError: For another model than the one that is served.
    """
    if request.model not in (None, served):
        raise UnknownModelError(str(request.model), served)


def check_length(prompt: Sequence[int], engine: Engine, params: SamplingParams) -> None:
    """Checks that a prompt fits into the context, with a token behind it unless `params` want none.

    Raises:
        APIError: With status 400 if the prompt fills the context.
    """
    limit = engine.state.max_length
    wants_text = params.max_new_tokens > 0
    if len(prompt) > limit - wants_text:
        bound = "fewer than" if wants_text else "at most"
        words = f"prompt: got {len(prompt)} tokens; expected {bound} the context of {limit}; shorten it"
        raise APIError(400, words, code="context_length_exceeded")


def check_excess(excess: str | None, engine: Engine) -> None:
    """Refuses a prompt that `describe_excess` found far too long, before all of it is encoded.

    Raises:
        APIError: With status 400, unless `excess` is None.
    """
    if excess is not None:
        words = f"prompt: {excess}; expected fewer than the context of {engine.state.max_length}; shorten it"
        raise APIError(400, words, code="context_length_exceeded")


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS):
        raise ValueError(f"logit_bias: got {name!r:.40}; expected token ids as names")
    return int(name)


def _read_grammar(wanted: ResponseFormat | None, tokenizer: Any, backend: str) -> Matcher | None:
    """Makes the grammar of a response format."""
    if wanted is None or wanted.type == "text":
        return None
    schema: dict[str, Any] = {"type": "object"}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            words = "response_format: got json_schema without a schema; expected an object json_schema with it"
            raise ValueError(words)
        schema = wanted.json_schema.definition
    try:
        found: Matcher = make_grammar("json_schema", schema, tokenizer, grammar_backend=backend)
    except ValueError as error:
        raise ValueError(f"response_format: {error}") from error
    return found
