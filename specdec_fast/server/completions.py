"""The route /v1/completions. Tests: tests/server/test_completions.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from starlette.responses import Response

from specdec_fast.engine.prompts import added_beginning, describe_excess
from specdec_fast.server.generation import Generation, Piece, Prompt, Service
from specdec_fast.server.parameters import check_excess, check_length, check_model, read_params, repeat
from specdec_fast.server.responses import Decode, GenerationResponse, event_usage, make_decode, prompt_logprobs_json
from specdec_fast.server.schemas import CompletionRequest
from specdec_fast.server.text_offsets import Scored, TextOffsets, split_released

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
        self._tokenizer = service.engine.tokenizer
        self._lengths = [0] * len(generation.samples)  # characters that the client has
        self._offsets: dict[int, TextOffsets] = {}
        self._waiting: dict[int, list[Scored]] = {}
        self._begun: set[int] = set()

    def _echo(self, index: int) -> str:
        """Returns the prompt of a text."""
        given, number = self._request.prompt, self._generation.number_of_prompt(index)
        text = given if isinstance(given, str) else given[number]
        return text if isinstance(text, str) else self._text_of(self._generation.prompts[number].tokens)

    def _text_of(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    async def whole(self) -> dict[str, Any]:
        """Returns the object of the API when all texts have ended."""
        choices = {}
        async for piece in self._generation.pieces():
            choices[piece.index] = await self._choice(piece)
        return {**self._head, "choices": [choices[at] for at in sorted(choices)], "usage": self._generation.usage()}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of a stream."""
        options, made = self._request.stream_options, self._generation
        async for piece in made.pieces():
            yield {**self._head, "choices": [await self._choice(piece)], **event_usage(options, made)}
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": made.usage()}

    async def _choice(self, piece: Piece) -> dict[str, Any]:
        """Writes what was added to a text; beside the event loop if all tokens of a prompt are decoded for it."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        if (first and self._request.echo) or self._request.prompt_logprobs is not None:
            return await asyncio.to_thread(self._write, piece, first)
        return self._write(piece, first)

    def _write(self, piece: Piece, first: bool) -> dict[str, Any]:
        index, request = piece.index, self._request
        prefix = self._echo(index) if first and request.echo else ""
        text, reason = prefix + piece.text, piece.finish_reason
        self._lengths[index] += len(text)
        logprobs = None
        if request.logprobs is not None:
            waiting = [*self._waiting.get(index, ()), *self._scored(piece, prefix, first)]
            released, self._waiting[index] = split_released(waiting, self._lengths[index], reason is not None)
            logprobs = _logprobs(released, request.logprobs, self._decode)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if request.prompt_logprobs is not None:
            scores = self._generation.prompt_logprobs(index)
            choice["prompt_logprobs"] = prompt_logprobs_json(scores, request.prompt_logprobs, self._decode)
        return choice

    def _scored(self, piece: Piece, prefix: str, first: bool) -> list[Scored]:
        """Returns the tokens of a piece, after those of a prompt that is echoed."""
        index, prompt, found = piece.index, self._generation.prompt_of(piece.index), list[Scored]()
        if first and self._request.echo:
            scores = self._generation.prompt_logprobs(index)
            offsets = [min(at, len(prefix)) for at in self._offsets_of(prompt.tokens, prefix)]
            found = list(zip(prompt.tokens, scores, offsets))
        if first:
            skips = prompt.params[0].skip_special_tokens
            self._offsets[index] = TextOffsets(self._tokenizer, prompt.tokens, skips, len(prefix))
        return [*found, *((each.token, each, self._offsets[index].add(each.token)) for each in piece.logprobs)]

    def _offsets_of(self, tokens: Sequence[int], text: str) -> list[int]:
        """Returns where the tokens of a prompt begin in its text, which may lack those that the tokenizer adds."""
        added = added_beginning(self._tokenizer)
        count = len(added) if list(tokens[: len(added)]) == added else 0
        if self._text_of(tokens[count:]) != text:
            count = 0
        offsets = TextOffsets(self._tokenizer, (), self._text_of(tokens[count:]) != text)
        return [0] * count + [offsets.add(token) for token in tokens[count:]]


def _logprobs(found: Sequence[Scored], count: int, decode: Decode) -> dict[str, list[Any]]:
    """Log-probabilities in the form of completions. Of alternatives with equal texts the most probable is kept.

    Args:
        found: The tokens, and where they begin. The first one of a prompt has no log-probability.
        count: Most alternatives of each token.
        decode: Makes texts of tokens.

    Returns:
        The object `logprobs` of a choice.
    """
    tops = [None if each is None else each.top[:count] for _, each, _ in found]
    return {
        "tokens": [decode(token) for token, _, _ in found],
        "token_logprobs": [None if each is None else each.logprob for _, each, _ in found],
        "top_logprobs": [
            None if top is None else {decode(token): value for token, value in reversed(top)} for top in tops
        ],
        "text_offset": [at for _, _, at in found],
    }
