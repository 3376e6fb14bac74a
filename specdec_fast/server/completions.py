"""The route /v1/completions. Tests: tests/server/test_completions.py."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from starlette.responses import Response

from specdec_fast.engine.prompts import describe_excess
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.server.generation import Generation, Piece, Prompt, Service
from specdec_fast.server.parameters import check_excess, check_length, check_model, read_params, repeat
from specdec_fast.server.responses import Decode, GenerationResponse, make_decode, prompt_logprobs_json
from specdec_fast.server.schemas import CompletionRequest

_DEFAULT_MAX_TOKENS = 16
"""Of the OpenAI API."""


def completion_routes(service: Service) -> APIRouter:
    """Returns the routes of completions."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def create_completion(request: CompletionRequest) -> Response:
        check_model(request, service.settings.model_name)
        request.check_fields()
        prompts = await service.prepare(lambda: _read(request, service))
        generation = await service.generate(prompts, streams=bool(request.stream))
        completion = _Completion(request, service, generation)
        return GenerationResponse(generation, completion.stream() if request.stream else completion.whole())

    return routes


def _read(request: CompletionRequest, service: Service) -> list[Prompt]:
    """Encodes the prompts of a request, each with the parameters of its texts."""
    engine, prompt = service.engine, request.prompt
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    prompts: list[Any] = [*prompt] if several else [prompt]
    if not prompts:
        raise ValueError("prompt: got an empty list; expected at least one prompt")
    service.check_count(len(prompts) * max(request.n or 1, 1))
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = read_params(
        request,
        engine,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        grammar_backend=service.settings.grammar_backend,
    )
    if request.echo and request.logprobs is not None:
        params = replace(params, prompt_logprobs=max(request.logprobs, params.prompt_logprobs or 0))
    found = []
    for each in prompts:
        if isinstance(each, str):
            check_excess(describe_excess(each, engine.tokenizer, engine.state.max_length), engine)
        tokens = engine.encode(each, add_special_tokens=request.add_special_tokens)
        check_length(tokens, engine, params)
        found.append(repeat(request, tokens, params))
    return found


class _Completion:
    """Writes one completion.

    Args:
        request: The request.
        service: The service.
        generation: The texts.
    """

    def __init__(self, request: CompletionRequest, service: Service, generation: Generation) -> None:
        self._request, self._generation = request, generation
        self._decode = make_decode(service.engine.tokenizer)
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }
        self._offsets = [0] * len(generation.samples)
        self._begun: set[int] = set()
        self._prefixes = self._echoes() if request.echo else [""] * len(generation.samples)

    def _echoes(self) -> list[str]:
        """The prompt of each text."""
        given, prompts = self._request.prompt, self._generation.prompts
        texts = [given] if isinstance(given, str) else [each if isinstance(each, str) else None for each in given]
        found = []
        for at, prompt in enumerate(prompts):
            text = texts[at] if len(texts) == len(prompts) else None
            if text is None:
                text = "".join(map(self._decode, prompt.tokens))
            found += [text] * len(prompt.params)
        return found

    async def whole(self) -> dict[str, Any]:
        """Returns the object of the API when all texts have ended."""
        choices = {}
        async for piece in self._generation.pieces():
            choices[piece.index] = self._choice(piece)
        return {**self._head, "choices": [choices[at] for at in sorted(choices)], "usage": self._generation.usage()}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of a stream."""
        options = self._request.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        async for piece in self._generation.pieces():
            yield {**self._head, "choices": [self._choice(piece)], **usage}
        if usage:
            yield {**self._head, "choices": [], "usage": self._generation.usage()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        index, request = piece.index, self._request
        prefix, self._prefixes[index] = self._prefixes[index], ""
        logprobs = None
        if request.logprobs is not None:
            found: list[TokenLogprob | None] = [*piece.logprobs]
            if request.echo and index not in self._begun:
                found = [*self._generation.prompt_logprobs(index), *found]
            self._begun.add(index)
            first = self._generation.prompt_of(index).tokens[0]
            logprobs = _logprobs(found, first, request.logprobs, self._decode, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        text, reason = prefix + piece.text, piece.finish_reason
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if request.prompt_logprobs is not None:
            scores = self._generation.prompt_logprobs(index)
            choice["prompt_logprobs"] = prompt_logprobs_json(scores, request.prompt_logprobs, self._decode)
        return choice


def _logprobs(
    found: Sequence[TokenLogprob | None], first: int, count: int, decode: Decode, offset: int
) -> dict[str, list[Any]]:
    """Log-probabilities in the form of completions. Of alternatives with equal texts the most probable is kept.

    Args:
        found: The tokens; None for the first one of a prompt.
        first: The first token of the prompt.
        count: Most alternatives of each token.
        decode: Makes texts of tokens.
        offset: Characters of prompt and text before these tokens.

    Returns:
        The object `logprobs` of a choice.
    """
    tokens, offsets = [decode(first if each is None else each.token) for each in found], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [None if each is None else each.top[:count] for each in found]
    return {
        "tokens": tokens,
        "token_logprobs": [None if each is None else each.logprob for each in found],
        "top_logprobs": [
            None if top is None else {decode(token): value for token, value in reversed(top)} for top in tops
        ],
        "text_offset": offsets,
    }
