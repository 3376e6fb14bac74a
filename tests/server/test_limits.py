"""The key, the queue, and the lengths of bodies, prompts and texts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from oracles.toy_server import Running, make_engine, nothing_is_held, wait_for

from specdec_fast.server.generation import Service
from specdec_fast.server.settings import Settings

Start = Callable[..., Running]


def test_requests_need_the_key(start: Start) -> None:
    served = start(api_key="hunter2")
    assert [model.id for model in served.client(api_key="hunter2").models.list()] == ["toy"]
    for wrong in ("hunter", "hunter22", "none"):
        with pytest.raises(openai.AuthenticationError) as failed:
            served.client(api_key=wrong).completions.create(model="toy", prompt="one")
        assert failed.value.code == "invalid_api_key"
    for header in ({}, {"Authorization": "hunter2"}, {"Authorization": "Basic hunter2"}):
        assert served.post("completions", {"prompt": "one"}, headers=header).status_code == 401
    for path in ("/v1/models", "/v1/nothing"):
        assert served.request("GET", path).status_code == 401
    for path in ("/health", "/metrics", "/version"):
        assert served.request("GET", path).status_code == 200


def test_a_full_queue_refuses_and_recovers(start: Start) -> None:
    served = start(make_engine(max_rows=1, max_length=4096), max_queue=2)
    served.target.before_pass = lambda: time.sleep(0.002)
    client, extra = served.client(), {"ignore_eos": True}
    streams = [
        client.completions.create(model="toy", prompt="one", max_tokens=4000, stream=True, extra_body=extra)
        for _ in range(3)
    ]
    with pytest.raises(openai.RateLimitError) as failed:
        client.completions.create(model="toy", prompt="one")
    assert failed.value.code == "queue_full" and failed.value.response.headers["retry-after"] == "1"
    assert served.post("completions", {"prompt": "one", "n": 4}).json()["error"]["param"] == "n"  # never fits
    for stream in streams:
        stream.close()
    wait_for(lambda: served.engine.idle)
    assert len(client.completions.create(model="toy", prompt="one", n=3).choices) == 3
    metrics = served.request("GET", "/metrics").text
    assert "specdec_rejected_requests_total 1.0" in metrics


def test_refused_requests_take_no_place_in_the_queue(start: Start) -> None:
    served = start(make_engine(max_rows=1), max_queue=0)
    for _ in range(3):
        bad = {"prompt": "one", "stop_token_ids": [10**6]}  # the engine finds out
        assert served.post("completions", bad).status_code == 400
    assert served.post("completions", {"prompt": "one"}).status_code == 200


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 1000):
        yield b" " * 1000


@pytest.mark.parametrize("size", [2_000, 50_000, 5_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_long_bodies_are_refused(start: Start, size: int, chunked: bool) -> None:
    served = start(max_body=1_000)
    content: Any = chunks(size) if chunked else b" " * size
    headers = {"Content-Type": "application/json"}
    try:
        answer = served.request("POST", "/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]
    except (httpx.WriteError, httpx.ReadError):  # the server closed the connection while the client still sent
        assert size > 100_000
    assert served.post("completions", {"prompt": "one"}).status_code == 200


def test_prompts_leave_space_for_a_token(start: Start) -> None:
    served = start(make_engine(max_length=32))
    refused = served.post("completions", {"prompt": [5] * 32})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    choice = served.post("completions", {"prompt": [5] * 31, "max_tokens": 99}).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("wanted", [{"echo": True, "logprobs": 0}, {"echo": True}, {"prompt_logprobs": 0}])
def test_a_prompt_may_fill_the_context_if_no_token_follows(start: Start, wanted: dict[str, Any]) -> None:
    served = start(make_engine(max_length=32))
    body = {"max_tokens": 0, **wanted}
    answer = served.post("completions", {"prompt": [5] * 32, **body}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    scores = choice.get("prompt_logprobs") or (choice["logprobs"] or {}).get("token_logprobs")
    assert scores is None if wanted == {"echo": True} else len(scores) == 32
    refused = served.post("completions", {"prompt": [5] * 33, **body})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert "got 33 tokens; expected at most the context of 32" in refused.json()["error"]["message"]
    refused = served.post("completions", {"prompt": [5] * 32, **body, "max_tokens": 1})
    assert "got 32 tokens; expected fewer than the context of 32" in refused.json()["error"]["message"]
    wait_for(lambda: nothing_is_held(served.engine))


@pytest.mark.parametrize(
    "wrong",
    [{"max_queue": -1}, {"max_body": 0}, {"model_name": ""}, {"api_key": ""}, {"api_key": "a\nb"}, {"api_key": "ü"}],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Settings(**{"model_name": "toy", **wrong})


def test_one_of_several_processes_of_a_model_does_not_serve() -> None:
    engine = make_engine()
    engine.target.ranks = SimpleNamespace(size=2)
    with pytest.raises(ValueError, match=r"model that 2 processes compute together; expected a whole one.*vLLM"):
        Service(engine, Settings("toy"))


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_prompt_that_cannot_fit_the_beginning_alone_is_encoded(
    start: Start, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start(make_engine(max_length=32))
    sizes, own = [], served.engine.tokenizer._encode_plus
    monkeypatch.setattr(
        served.engine.tokenizer, "_encode_plus", lambda text, *a, **k: sizes.append(len(text)) or own(text, *a, **k)
    )
    text = "one two " * 100_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": ["one", text]}
    refused = served.post("chat/completions" if chat else "completions", body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "context_length_exceeded" and sizes and max(sizes) <= 512
    words = (
        r"prompt: got 8\d+ characters, the first 512 of which are \d+ tokens; expected fewer than the context of 32; sh"
    )
    assert re.match(words, error["message"])
