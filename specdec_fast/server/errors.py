"""Errors in the form of the OpenAI API: {"error": {"message", "type", "param", "code"}}.

Tests: tests/server/test_errors.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specdec_fast.core.remedies import Remedy, stated

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
OURS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "template_options": "chat_template_kwargs",
}
"""Parameter of the engine -> its name in the API."""
_WITH_TOKENIZER = "start the server with a model that has a tokenizer: --model"
REMEDIES = {
    Remedy.TOKENIZER_OR_IDS: _WITH_TOKENIZER,
    Remedy.TOKENIZER_OR_STOP_IDS: _WITH_TOKENIZER,
    Remedy.TOKENIZER_OR_BAD_WORD_IDS: _WITH_TOKENIZER,
    Remedy.TOKENIZER_OR_CHAT_IDS: _WITH_TOKENIZER,
    Remedy.CHAT_TEMPLATE: "use /v1/completions, or start the server with an instruct model: --model",
    Remedy.OTHER_MESSAGES: "change them",
    Remedy.OWN_TEMPLATE: "leave it out",
    Remedy.TEMPLATE_ARGUMENTS: "pass add_generation_prompt and continue_final_message beside it, and drop the others",
    Remedy.MORE_PAGES: "lower max_tokens",
}
"""What a client does about a request that the engine refuses."""
_RETRY_SECONDS = "1"
_MOST_SHOWN = 60
"""Most characters of a value in a message."""
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_long": "a string of at most {max_length} characters",
    "string_type": "a string",
    "string_unicode": "a string without lone surrogates",
    "too_long": "at most {max_length} entries",
}
"""Kind of an error of pydantic -> what the field expects."""


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
        wrong = refused(stated(error, REMEDIES))
        raise wrong from error


def refused(words: str) -> APIError:
    """Returns the error of the API for what the engine says about a request."""
    message = re.sub("^grammar: ", "response_format: ", words.removeprefix("SamplingParams."))
    for name, ours in OURS.items():
        message = re.sub(rf"\b{name}\b", ours, message)
    named = re.match(r"(\w+): ", message)
    return APIError(400, message, param=named and named[1])


def _wrong_types(error: RequestValidationError) -> APIError:
    """Converts errors of pydantic about the first field that has any."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", "")
        return APIError(400, f"body: got invalid JSON ({reason} at character {found[0]['loc'][-1]})")
    place = found[0]["loc"][1:2]
    if not place:
        return APIError(422, "body: expected a JSON object, with the header Content-Type: application/json")
    reasons = dict.fromkeys(_expected(each) for each in found if each["loc"][1:2] == place)
    body = error.body if isinstance(error.body, dict) else {}
    names, absent = [str(place[0])], place[0] not in body
    got: Any = body.get(place[0])
    for name in found[0]["loc"][2:]:
        absent = not isinstance(got, dict) or name not in got
        if absent:
            break
        names, got = [*names, str(name)], got[name]
    words = "nothing" if absent and found[0]["type"] == "missing" else _shortened(got)
    return APIError(422, f"{'.'.join(names)}: got {words}; expected {' or '.join(reasons)}", param=names[0])


def _expected(error: Mapping[str, Any]) -> str:
    """What pydantic expected, in words. Elements of lists say that they are in one."""
    if error["type"] == "missing":
        return "a value, since the field is required"
    words = _EXPECTED.get(error["type"])
    words = str(error["msg"]) if words is None else words.format(**error.get("ctx", {}))
    depth = sum(isinstance(each, int) for each in error["loc"][2:])
    return "a list of " * depth + re.sub(r"^(?:an? )?((?:finite )?\w+)", r"\1s", words) if depth else words


def _shortened(value: Any) -> str:
    try:
        words = to_json(value).decode()
    except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
        return type(value).__name__
    return words if len(words) <= _MOST_SHOWN else f"{words[:_MOST_SHOWN]}..."


def _routes(app: FastAPI) -> list[str]:
    """Returns the routes of an application, such as "GET /health"."""
    paths = app.openapi()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


def install_error_handlers(app: FastAPI) -> None:
    """Answers every error of an application in the form of the OpenAI API, without a traceback."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, APIError):
            return error.response()
        if isinstance(error, RequestValidationError):
            return _wrong_types(error).response()
        if isinstance(error, HTTPException):
            if isinstance(error.__cause__, ValueError | RecursionError):  # raised by FastAPI about the body
                reason = str(error.__cause__).partition(";")[0]
                return APIError(400, f"body: got no JSON ({reason}); expected a JSON object in UTF-8").response()
            served = ", ".join(_routes(app)) if error.status_code in (404, 405) else ""
            hint = f"; expected one of {served}" if served else ""
            wrong = APIError(error.status_code, f"{request.method} {request.url.path!r}: {error.detail}{hint}")
            wrong.headers = error.headers
            return wrong.response()
        return APIError(500, "the server failed; its log has the reason").response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
