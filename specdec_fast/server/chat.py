"""The route /v1/chat/completions. Tests: tests/server/test_chat.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from starlette.responses import Response

from specdec_fast.engine.chat import describe_chat_excess
from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.server.errors import APIError
from specdec_fast.server.generation import Generation, Piece, Prompt, Service
from specdec_fast.server.parameters import check_excess, check_length, check_model, read_params, repeat
from specdec_fast.server.responses import Decode, GenerationResponse, event_usage, make_decode, prompt_logprobs_json
from specdec_fast.server.schemas import ChatRequest

_NO_TOOLS = "tools: not supported, since calls are not parsed; describe them in a message, or pass tool_choice none"


def chat_routes(service: Service) -> APIRouter:
    """Returns the routes of chats."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(request: ChatRequest) -> Response:
        check_model(request, service.settings.model_name)
        request.check_fields()
        prompt = await service.prepare(lambda: _read(request, service))
        generation = await service.generate([prompt], streams=bool(request.stream))
        chat = _Chat(request, service, generation)
        return GenerationResponse(generation, chat.stream() if request.stream else chat.whole())

    return routes


def _read(request: ChatRequest, service: Service) -> Prompt:
    """Applies the chat template, and reads the parameters of the texts."""
    engine = service.engine
    service.check_count(request.n or 1)
    if request.tools and request.tool_choice != "none":
        raise APIError(400, _NO_TOOLS, param="tools", code="unsupported")
    if request.top_logprobs and not request.logprobs:
        raise ValueError("top_logprobs: got a number without logprobs; expected logprobs true")
    limit = engine.state.max_length
    check_excess(describe_chat_excess(request.messages, engine.tokenizer, limit, request.chat_template_kwargs), engine)
    tokens = engine.encode_chat(
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        template_options=request.chat_template_kwargs,
    )
    limits = {limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise ValueError("max_tokens: got another number than max_completion_tokens; expected one of them")
    max_tokens = limits.pop() if limits else max(limit - len(tokens), 1)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = read_params(
        request, engine, max_tokens=max_tokens, logprobs=logprobs, grammar_backend=service.settings.grammar_backend
    )
    check_length(tokens, engine, params)
    if not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *engine.end_of_turn_ids))
    return repeat(request, tokens, params)


class _Chat:
    """Writes one chat completion.

    Args:
        request: The request.
        service: The service.
        generation: The texts.
    """

    def __init__(self, request: ChatRequest, service: Service, generation: Generation) -> None:
        self._request, self._generation = request, generation
        self._decode = make_decode(service.engine.tokenizer)
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }

    async def whole(self) -> dict[str, Any]:
        """Returns the object of the API when all texts have ended."""
        choices = {}
        async for piece in self._generation.pieces():
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices[piece.index] = self._choice(piece.index, "message", message, piece)
        made: dict[str, Any] = {
            **self._head,
            "choices": [choices[at] for at in sorted(choices)],
            "usage": self._generation.usage(),
        }
        if (count := self._request.prompt_logprobs) is not None:
            scores = self._generation.prompt_logprobs(0)
            made["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs_json, scores, count, self._decode)
        return made

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the objects of a stream."""
        options, made = self._request.stream_options, self._generation
        for index in range(len(made.samples)):
            first = self._choice(index, "delta", {"role": "assistant", "content": ""}, None)
            yield {**self._head, "choices": [first], **event_usage(options, made)}
        async for piece in made.pieces():
            delta = {"content": piece.text} if piece.text else {}
            choice = self._choice(piece.index, "delta", delta, piece)
            yield {**self._head, "choices": [choice], **event_usage(options, made)}
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": made.usage()}

    def _choice(self, index: int, kind: str, message: dict[str, Any], piece: Piece | None) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs and piece is not None:
            logprobs = {"content": _logprobs(piece.logprobs, self._decode), "refusal": None}
        reason = None if piece is None else piece.finish_reason
        return {"index": index, kind: message, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(found: Sequence[TokenLogprob], decode: Decode) -> list[dict[str, Any]]:
    """Log-probabilities in the form of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode(token)
        whole = "�" not in text  # else a part of a character, whose bytes the tokenizer does not tell
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    return [{**entry(each.token, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top]} for each in found]
