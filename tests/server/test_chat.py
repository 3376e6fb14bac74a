"""/v1/chat/completions, with the client of OpenAI: the engine's answers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI
from oracles.toy_chat import chat_tokenizer, speaker
from oracles.toy_server import TOKENIZER, Running, make_engine

from specdec_fast import Engine, SamplingParams

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
Start = Callable[..., Running]


@pytest.fixture
def client(served: Running) -> OpenAI:
    return served.client()


def answer(params: SamplingParams) -> Any:
    """The engine's own answer."""
    return make_engine(drafter=None).chat(HELLO, params)


def test_answers_are_the_engines(client: OpenAI) -> None:
    handle = answer(SamplingParams(seed=5, max_new_tokens=20, temperature=0.7, top_p=0.9))
    options: dict[str, Any] = {"model": "toy", "messages": HELLO, "seed": 5, "temperature": 0.7, "top_p": 0.9}
    for limit in ({"max_tokens": 20}, {"max_completion_tokens": 20}):
        made = client.chat.completions.create(**options, **limit)
        assert made.choices[0].message.content == handle.text and made.choices[0].message.role == "assistant"
        assert made.choices[0].finish_reason == "length"
        assert made.usage is not None and made.usage.prompt_tokens == len(handle.prompt)
    parts = list(client.chat.completions.create(**options, max_tokens=20, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == handle.text
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_answers_end_where_the_turn_does(start: Start) -> None:
    """The end of a turn is in no generation config of this model, and no length is given."""
    tokenizer = chat_tokenizer()
    served = start(Engine(speaker(tokenizer, "Hi you"), tokenizer=tokenizer, eos_token_ids=[0]))
    made = served.client().chat.completions.create(model="toy", messages=HELLO, temperature=0)
    assert made.choices[0].message.content == "Hi you" and made.choices[0].finish_reason == "stop"


def test_without_a_length_the_context_ends_the_answer(start: Start) -> None:
    served = start(make_engine(max_length=96))
    body = {"messages": HELLO, "seed": 1, "ignore_eos": True}
    usage = served.post("chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == 96 and usage["prompt_tokens"] > 30


def test_turns_share_the_beginning(start: Start) -> None:
    client = start().client()
    first = client.chat.completions.create(model="toy", messages=HELLO, seed=5, max_tokens=20)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more = [*HELLO, said, {"role": "user", "content": "Again"}]
    second = client.chat.completions.create(model="toy", messages=more, seed=5, max_tokens=20)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details is not None and first.usage.prompt_tokens_details.cached_tokens == 0
    shared = second.usage.prompt_tokens_details.cached_tokens
    assert shared is not None and first.usage.prompt_tokens // 2 < shared < second.usage.prompt_tokens
    salted = client.chat.completions.create(
        model="toy", messages=more, seed=5, max_tokens=20, extra_body={"cache_salt": "x"}
    )
    assert salted.choices == second.choices
    assert salted.usage is not None and salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_logprobs(client: OpenAI) -> None:
    handle = answer(SamplingParams(seed=5, max_new_tokens=10, logprobs=2))
    made = client.chat.completions.create(
        model="toy", messages=HELLO, seed=5, max_tokens=10, logprobs=True, top_logprobs=2
    )
    assert made.choices[0].logprobs is not None and made.choices[0].logprobs.content is not None
    entries = made.choices[0].logprobs.content
    assert len(entries) == 10
    for entry, own in zip(entries, handle.logprobs):
        assert entry.token == TOKENIZER.decode([own.token]) and entry.bytes == list(entry.token.encode())
        assert entry.logprob == pytest.approx(own.logprob)
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
            (TOKENIZER.decode([token]), pytest.approx(value)) for token, value in own.top
        ]


def test_a_part_of_a_character_has_no_bytes(client: OpenAI) -> None:
    token = TOKENIZER.encode("ä", add_special_tokens=False)[0]
    made = client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=1, logprobs=True, logit_bias={str(token): 100}
    )
    assert made.choices[0].logprobs is not None and made.choices[0].logprobs.content is not None
    (entry,) = made.choices[0].logprobs.content
    assert entry.token == "�" and entry.bytes is None


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_json_schema(client: OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    made: Any = client.chat.completions.create(
        model="toy",
        messages=HELLO,
        seed=5,
        n=3,
        max_tokens=60,
        stream=stream,
        response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": True}},
    )
    found = {0: "", 1: "", 2: ""}
    for part in made if stream else [made]:
        for choice in part.choices:
            found[choice.index] += (choice.delta.content if stream else choice.message.content) or ""
    for text in found.values():
        value = json.loads(text)
        assert value.keys() == {"a", "b"} and value["a"] <= 99 and value["b"] in ("x", "y")


def test_answers_are_json_objects(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="toy", messages=HELLO, seed=5, max_tokens=60, response_format={"type": "json_object"}
    )
    assert (made.choices[0].message.content or "").startswith("{")


def test_a_message_is_continued(client: OpenAI) -> None:
    engine = make_engine(drafter=None)
    messages: Any = [*HELLO, {"role": "assistant", "content": "It was"}]
    prompt = engine.encode_chat(messages, continue_final_message=True)
    (handle,) = engine.generate([prompt], SamplingParams(seed=5, max_new_tokens=9))
    made = client.chat.completions.create(
        model="toy", messages=messages, seed=5, max_tokens=9, extra_body={"continue_final_message": True}
    )
    assert made.choices[0].message.content == handle.text


def test_template_options_reach_the_template(served: Running) -> None:
    """`mood` is a variable of the toy template, which writes it as text."""
    body: Any = {"messages": HELLO, "max_tokens": 1}
    plain = served.post("chat/completions", body).json()["usage"]["prompt_tokens"]
    moody = served.post("chat/completions", {**body, "chat_template_kwargs": {"mood": "calm"}}).json()["usage"]
    assert moody["prompt_tokens"] == plain + len("(calm)")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"tools": [TOOL]}, "tools", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs true"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "0 to 20"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "one of them"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
    ],
)
def test_what_is_refused(served: Running, change: dict[str, Any], param: str, words: str) -> None:
    answered = served.post("chat/completions", {"messages": HELLO, **change})
    error = answered.json()["error"]
    assert answered.status_code == 400 and error["param"] == param and words in error["message"]


def test_no_alternatives_without_logprobs(served: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "logprobs": False, "top_logprobs": 0}
    assert served.post("chat/completions", body).json()["choices"][0]["logprobs"] is None


def test_tools_that_no_answer_may_call_change_nothing(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "toy", "messages": HELLO, "seed": 5, "max_tokens": 9}
    plain = client.chat.completions.create(**options)
    given = client.chat.completions.create(**options, tools=[TOOL], tool_choice="none")
    assert given.choices[0].message == plain.choices[0].message


def test_a_model_without_a_template_says_so(start: Start) -> None:
    engine = make_engine()
    engine.tokenizer = chat_tokenizer(template=None)
    with pytest.raises(openai.BadRequestError, match=r"chat template.*; use /v1/completions, or start the server with"):
        start(engine).client().chat.completions.create(model="toy", messages=HELLO)
