"""Errors have the form of the OpenAI API: status, message, parameter and code, and never a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import httpx
import pytest
from oracles.toy_server import Running

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.remedies import RefusedError, Remedy
from specdec_fast.server.errors import OURS, REMEDIES, APIError, refusing
from specdec_fast.server.generation import _explain
from specdec_fast.server.parameters import NAMES
from specdec_fast.server.schemas import ChatRequest, CompletionRequest

Start = Callable[..., Running]
JSON = {"Content-Type": "application/json"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json" and "Traceback" not in answer.text
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        # wrong types
        ({"prompt": 5}, 422, "prompt", "prompt: got 5; expected a string or a list"),
        ({"prompt": [1, "a"]}, 422, "prompt", 'got [1,"a"]; expected a string or a list of integers or'),
        ({"prompt": {"text": "a"}}, 422, "prompt", 'got {"text":"a"}; expected a string'),
        ({"temperature": "hot"}, 422, "temperature", 'temperature: got "hot"; expected a number'),
        ({"max_tokens": "5"}, 422, "max_tokens", 'got "5"; expected an integer'),
        ({"max_tokens": 5.5}, 422, "max_tokens", "got 5.5; expected an integer"),
        ({"stream": 1}, 422, "stream", "got 1; expected true or false"),
        ({"stop": 5}, 422, "stop", "got 5; expected a string or a list"),
        ({"stop": ["a"] * 17}, 422, "stop", '"...; expected a string or at most 16 entries'),
        ({"bad_words": [5]}, 422, "bad_words", "got [5]; expected a list of strings or a list of lists"),
        ({"logit_bias": [1]}, 422, "logit_bias", "got [1]; expected an object"),
        ({"logit_bias": {"4": "b"}}, 422, "logit_bias", 'logit_bias.4: got "b"; expected a number'),
        (
            {"response_format": {"type": "xml"}},
            422,
            "response_format",
            "response_format.type: got \"xml\"; expected 'text',",
        ),
        ({"stream_options": True}, 422, "stream_options", "got true; expected an object"),
        # values out of range
        ({"prompt": [[]]}, 400, "prompt", "at least one"),
        ({"prompt": []}, 400, "prompt", "at least one"),
        ({"prompt": [[1], []]}, 400, "prompt", "at least one"),
        ({"prompt": [10**6]}, 400, "prompt", "token id 1000000"),
        ({"prompt": "\ud800"}, 400, "prompt", "surrogates"),
        ({"temperature": -1}, 400, "temperature", "positive"),
        ({"top_p": 2}, 400, "top_p", "got 2"),
        ({"n": 0}, 400, "n", "at least 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"min_tokens": 99}, 400, "min_tokens", "max_tokens"),
        ({"seed": -1}, 400, "seed", "2**63"),
        ({"stop": ""}, 400, "stop", "non-empty"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
        ({"logprobs": 21}, 400, "logprobs", "0 to 20"),
        ({"echo": True, "logprobs": 21}, 400, "logprobs", "0 to 20"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream true"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "schema"),
        ({"response_format": schema_format(None)}, 422, "response_format", "got null; expected an object"),
        ({"response_format": {"type": None}}, 422, "response_format", "response_format.type: got null"),
        ({"response_format": schema_format({"type": "x"})}, 400, "response_format", "JSON schema: "),
        ({"response_format": schema_format({"enum": ["\ud800"]})}, 400, "response_format", "not JSON"),
        (
            {"response_format": schema_format({"type": "null"}), "ignore_eos": True},
            400,
            "response_format",
            "ignore_eos",
        ),
        ({"logit_bias": {"\u0663": 1}}, 400, "logit_bias", "token ids"),  # a digit, but not of ASCII
        ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "token ids"),
        # what would take minutes or all memory
        ({"n": 10**12}, 400, "n", "at most 72"),
        ({"prompt": ["a"] * 10, "n": 8}, 400, "n", "got 80 texts"),
        ({"no_repeat_ngram_size": 10**9}, 400, "no_repeat_ngram_size", "up to 1024"),
        ({"bad_words": [[5] * 1025]}, 400, "bad_words", "at most 1024 tokens"),
        ({"bad_words": ["a" * 1025]}, 422, "bad_words", "at most 1024"),
        ({"bad_words": [[5]] * 1025}, 422, "bad_words", "at most 1024"),
        ({"bad_words": ["\ud800"]}, 422, "bad_words", "strings without lone surrogates or"),
        ({"stop": "a" * 1025}, 422, "stop", "expected a string of at most 1024 characters or"),
        ({"stop": ["a" * 1025]}, 422, "stop", "a list of strings of at most 1024 characters"),
        # what is not served
        ({"model": "gpt"}, 404, "model", "'toy'"),
        ({"tempreature": 1}, 400, "tempreature", "'temperature'"),
        ({"stream": True, "stream_options": {"include_usages": True}}, 400, "include_usages", "'include_usage'"),
        ({"best_of": 3}, 400, "best_of", "use n"),
        ({"best_of": 3, "n": 2}, 400, "best_of", "use n"),
        ({"suffix": "end"}, 400, "suffix", "not supported"),
        ({"max_completion_tokens": 3}, 400, "max_completion_tokens", "use max_tokens"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort", "chat_template_kwargs"),
        ({"guided_json": {"type": "object"}}, 400, "guided_json", "response_format"),
        ({"num_beams": 4}, 400, "num_beams", "use n with"),
        ({"max_new_tokens": 4}, 400, "max_new_tokens", "use max_tokens"),
        ({"use_beam_search": True}, 400, "use_beam_search", "not supported"),
        ({"guided_json": {}}, 400, "guided_json", "response_format"),  # the schema of every JSON text
        ({"guided_choice": []}, 400, "guided_choice", "response_format"),
        ({"do_sample": False}, 400, "do_sample", "temperature"),  # greedy decoding
        ({"max_new_tokens": 0}, 400, "max_new_tokens", "use max_tokens"),
        ({"response_format": {"type": "text", "user": "me"}}, 400, "user", "unknown parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, 400, "shema", "'schema'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    served: Running, change: dict[str, Any], status: int, param: str | None, words: str, stream: bool
) -> None:
    if stream and "stream_options" not in change:
        change = {"stream": True, **change}
    content = json.dumps({"prompt": "one", **change})  # httpx itself refuses lone surrogates
    answer = served.request("POST", "/v1/completions", content=content, headers=JSON)
    error = error_of(answer)
    assert answer.status_code == status and words in error["message"]
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error" and served.engine.idle


@pytest.mark.parametrize("value", [0, 0.0, False, "", [], {}])
@pytest.mark.parametrize("place", [None, "stream_options"])
def test_a_misspelled_field_is_refused_whatever_its_value(served: Running, value: Any, place: str | None) -> None:
    change = {"temprature": value} if place is None else {"stream": True, place: {"include_usages": value}}
    answer = served.post("completions", {"prompt": "one", "max_tokens": 1, **change})
    assert answer.status_code == 400 and error_of(answer)["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (b"{", "application/json", 400, "body: got invalid JSON"),
        (b"\xff", "application/json", 400, "body: got no JSON ('utf-8' codec"),
        (b"[" * 100_000, "application/json", 400, "body: got no JSON (maximum recursion depth"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "body: got no JSON (Exceeds the limit"),
        (b"[]", "application/json", 422, "body: expected a JSON object"),
        (b"", "application/json", 422, "body: expected a JSON object"),
        (b'{"prompt": "one"}', "text/plain", 422, "Content-Type: application/json"),
        (b'{"prompt": NaN, "temperature": NaN}', "application/json", 422, "prompt"),
        (b'{"prompt": "one", "temperature": NaN}', "application/json", 400, "temperature"),
    ],
)
def test_bodies_that_are_no_objects(served: Running, content: bytes, kind: str, status: int, words: str) -> None:
    answer = served.request("POST", "/v1/completions", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status and words in error_of(answer)["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}},
        {"best_of": None, "suffix": "", "guided_json": None, "use_beam_search": False, "functions": []},
        {"temperature": None, "n": None, "stream": None, "seed": None, "stop": None},
        {"best_of": 2, "n": 2},
        {"best_of": 1, "num_beams": 1, "early_stopping": False, "length_penalty": 1.0, "typical_p": 1.0},
        {"min_new_tokens": 0, "logits_processors": [], "stop_strings": [], "structured_outputs": {}},
        {"whatever": None, "response_format": {"type": "text", "json_schema": None}},
        {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": None, "schema": {}, "strict": None}}},
        {"echo": False, "priority": 0, "modalities": ["text"], "spaces_between_special_tokens": True},
    ],
)
def test_fields_without_effect_are_accepted(served: Running, extra: dict[str, Any]) -> None:
    options = {"max_tokens": 2, **extra}
    assert served.post("completions", {"prompt": "one", **options}).status_code == 200
    messages = [{"role": "user", "content": "one"}]
    assert served.post("chat/completions", {"messages": messages, **options}).status_code == 200


def test_a_prompt_that_is_missing_or_nested_deeply(served: Running) -> None:
    for content, words in (
        (b"{}", "prompt: got nothing;"),
        (b'{"prompt": null}', "prompt: got null;"),
        (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", "prompt: "),
    ):
        answer = served.request("POST", "/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 422 and error_of(answer)["message"].startswith(words)


def test_unknown_places(served: Running) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/docs", 404)):
        answer = served.request(method, path)
        message = error_of(answer)["message"]
        assert answer.status_code == status and path in message and "expected one of POST /v1/completions, " in message
    answer = served.request("GET", "/v1/models/gpt")
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"


@pytest.mark.parametrize("remedy", Remedy)
def test_every_remedy_is_one_of_the_client(remedy: Remedy) -> None:
    with pytest.raises(APIError) as raised, refusing():
        raise RefusedError("messages: got a fault", remedy)
    words = raised.value.detail
    assert words == f"messages: got a fault; {REMEDIES[remedy]}" and not re.search(r"\w=|max_new_tokens|load", words)
    assert raised.value.status_code == 400 and raised.value.param == "messages"


def test_names_that_are_replaced_exist() -> None:
    of_python = {field.name for field in fields(SamplingParams)} | {*signature(Engine.encode_chat).parameters}
    of_api = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert OURS.keys() <= of_python - of_api and {*OURS.values()} <= of_api
    assert {name: ours for ours, name in NAMES.items() if ours != name}.items() <= OURS.items()


def test_a_request_that_no_pool_holds_gets_an_error_about_its_own_fields(start: Start) -> None:
    served = start()
    with pytest.MonkeyPatch.context() as small:
        small.setattr(served.target.cache.pages, "num_pages", 5)
        error = error_of(served.post("completions", {"prompt": "one", "max_tokens": 100}))
    assert re.fullmatch(
        r"request: \d+ tokens need \d+ pages of the cache; the pool has 4; lower max_tokens", error["message"]
    )


def test_a_fault_of_the_server_is_not_shown(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    served = start()

    def fail(prompt: object, **options: object) -> list[int]:
        raise KeyError("secret")

    monkeypatch.setattr(served.engine, "encode", fail)
    answer = served.post("completions", {"prompt": "one"})
    error = error_of(answer)
    assert answer.status_code == 500 and error["type"] == "server_error" and "secret" not in answer.text


def test_a_text_that_cannot_continue_ends_with_its_reason(start: Start) -> None:
    """A model whose logits are no numbers."""
    served = start()
    served.target.table = served.target.table * float("nan")
    answer = served.post("completions", {"prompt": "one"})
    assert answer.status_code == 500 and "no finite logit" in error_of(answer)["message"]


def test_a_grammar_that_cannot_go_on_is_a_fault_of_the_request(served: Running) -> None:
    """The text may not end before its third token, and nothing follows the schema's only text."""
    body = {"prompt": "one", "response_format": schema_format({"const": 1}), "min_tokens": 3}
    answer = served.post("completions", body)
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == "response_format"
    assert error["message"].startswith("response_format: no token") and error["message"].endswith("and min_tokens")


def test_a_grammar_whose_library_fails_is_a_fault_of_the_server() -> None:
    fault = _explain(ValueError("request 3: grammar: a rollback of 3 tokens failed"))
    assert fault.status_code == 500 and "rollback" in str(fault)
