"""Errors in the form of the OpenAI API: {"error": {"message", "type", "param", "code"}}.

Tests: tests/server/test_errors.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "template_options": "chat_template_kwargs",
}
"""Parameter of the engine -> its name in the API."""
_OF_CODE = {
    "pass chat_template=, or give the text to generate": (
        "use /v1/completions, or start the server with an instruct model: --model"
    ),
    "; change them, or pass another chat_template": "; change them",
    "; pass tools, chat_template, add_generation_prompt and continue_final_message as arguments, and drop the others": (
        "; pass add_generation_prompt and continue_final_message beside it, and drop the others"
    ),
}
"""Remedies in Python -> remedies for the client."""
_RETRY_SECONDS = "1"
_MAX_REASONS = 3


class APIError(HTTPException):
    """An error that a client gets as JSON.

    Args:
        status: HTTP status.
        message: What was wrong, and what to do.
        param: The field of the request, or None.
        code: A short name of the error for programs, or None.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, {"Retry-After": _RETRY_SECONDS} if status in (429, 503) else None)
        self.param, self.code = param, code

    def as_dict(self) -> dict[str, Any]:
        """Returns the error as JSON values."""
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the error as a response."""
        return Response(to_json(self.as_dict()), self.status_code, self.headers, "application/json")


class StoppedError(APIError):
    """The engine serves no request."""

    def __init__(self) -> None:
        super().__init__(503, "the engine has stopped", code="unavailable")


class UnknownModelError(APIError):
    """A request names a model that is not served.

    Args:
        name: The name in the request.
        served: The name of the model that is served.
    """

    def __init__(self, name: str, served: str) -> None:
        words = f"model: got {name!r:.200}; expected {served!r}, the only one that is served"
        super().__init__(404, words, param="model", code="model_not_found")


def to_json(value: Any) -> bytes:
    """Encodes JSON values. Lone surrogates, which UTF-8 cannot encode, are replaced."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@contextmanager
def refusing() -> Iterator[None]:
    """Turns the engine's errors about a request into errors of the API, in its words.

    Raises:
        APIError: With status 400, for a ValueError.
    """
    try:
        yield
    except ValueError as error:
        message = str(error).removeprefix("SamplingParams.")
        for python, ours in _OF_CODE.items():
            message = message.replace(python, ours)
        for name, ours in _OURS.items():
            message = re.sub(rf"\b{name}\b", ours, message)
        named = re.match(r"(\w+): ", message)
        raise APIError(400, message, param=named and named[1]) from error


def _wrong_types(error: RequestValidationError) -> APIError:
    """Converts errors of pydantic. Those after the first few of the first field are left out."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", "")
        return APIError(400, f"body: got invalid JSON ({reason} at character {found[0]['loc'][-1]})")
    place = found[0]["loc"][1:2]
    if not place:
        return APIError(422, "body: expected a JSON object, with the header Content-Type: application/json")
    reasons = dict.fromkeys(str(each["msg"]) for each in found if each["loc"][1:2] == place)
    message = "; or ".join(list(reasons)[:_MAX_REASONS])
    return APIError(422, f"{place[0]}: {message}", param=str(place[0]))


def install_error_handlers(app: FastAPI) -> None:
    """Answers every error of an application in the form of the OpenAI API, without a traceback."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, APIError):
            return error.response()
        if isinstance(error, RequestValidationError):
            return _wrong_types(error).response()
        if isinstance(error, HTTPException):
            wrong = APIError(error.status_code, f"{request.method} {request.url.path!r}: {error.detail}")
            wrong.headers = error.headers
            return wrong.response()
        return APIError(500, "the server failed; its log has the reason").response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
