"""Responses over a generation: one JSON object, or a stream of server-sent events.

Both cancel their texts when the client leaves. Tests: tests/server/test_streams.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec_fast.sampling.logprobs import TokenLogprob
from specdec_fast.server.errors import APIError, to_json
from specdec_fast.server.generation import Generation
from specdec_fast.server.schemas import StreamOptions

log = logging.getLogger("specdec_fast")
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class GenerationResponse(Response):
    """A response that ends its texts when it ends, for whatever reason.

    Args:
        generation: The texts.
        content: An awaitable with the JSON object, or an iterator over the objects of a stream.
    """

    def __init__(self, generation: Generation, content: Awaitable[Any] | AsyncIterator[Any]) -> None:
        super().__init__()
        self._generation, self._content = generation, content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, unless the client leaves before."""
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(self._content, AsyncIterator):
            await self._stream(self._content, send)
        else:
            await Response(to_json(await self._content), media_type="application/json")(scope, receive, send)

    async def _stream(self, objects: AsyncIterator[Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

        async def event(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for value in objects:
                await event(b"data: " + to_json(value) + b"\n\n")
        except Exception as error:  # the status is sent, so the error becomes an event
            if not isinstance(error, APIError):
                log.exception("a stream failed")
                error = APIError(500, "the server failed; its log has the reason")
            await event(b"data: " + to_json(error.as_dict()) + b"\n\n")
        await event(_DONE, more=False)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event_usage(options: StreamOptions | None, generation: Generation) -> dict[str, Any]:
    """Returns the field `usage` of an event before the last one; no field if none was asked for."""
    if options is None or not options.include_usage:
        return {}
    return {"usage": generation.usage() if options.continuous_usage_stats else None}


Decode = Callable[[int], str]
"""Token id -> its text."""


def prompt_logprobs_json(
    scores: Sequence[TokenLogprob | None], count: int, decode: Decode
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt in the form of vLLM: by token id, the prompt's own token first.

    Args:
        scores: The tokens of the prompt; None for the first one.
        count: Most alternatives of each token.
        decode: Makes texts of tokens.

    Returns:
        One object for each token of the prompt; None for the first one.
    """

    def entries(each: TokenLogprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(each.top, 1)}
        values = {each.token: each.logprob, **dict(each.top[:count])}
        return {
            str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": decode(token)}
            for token, value in values.items()
        }

    return [None if each is None else entries(each) for each in scores]


def make_decode(tokenizer: Any) -> Decode:
    """Returns a function that decodes single tokens, special ones included."""

    def decode(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return decode
