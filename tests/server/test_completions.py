"""/v1/completions, with the client of OpenAI: texts are the engine's, whatever the form of the request."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest
from openai import OpenAI
from oracles.toy_server import TOKENIZER, Running, make_engine

from specdec_fast import SamplingParams


def texts(prompts: list[Any], params: list[SamplingParams] | SamplingParams) -> list[str]:
    handles = make_engine(drafter=None).generate(prompts, params)
    assert all(handle.error is None for handle in handles)
    return [handle.text for handle in handles]


@pytest.fixture
def client(served: Running) -> OpenAI:
    return served.client()


def test_all_forms_of_a_prompt(client: OpenAI) -> None:
    ids = [TOKENIZER.encode(text) for text in ("one", "the thing")]
    params = SamplingParams(seed=5, max_new_tokens=16)
    expected = texts(["one", "the thing"], params)
    for prompt, count in (("one", 1), (["one", "the thing"], 2), (ids[0], 1), (ids, 2)):
        made = client.completions.create(model="toy", prompt=prompt, seed=5)
        assert [choice.text for choice in made.choices] == expected[:count]
        assert [choice.index for choice in made.choices] == list(range(count))
        assert made.usage is not None and made.usage.prompt_tokens == sum(map(len, ids[:count]))
        assert made.usage.completion_tokens == 16 * count == made.usage.total_tokens - made.usage.prompt_tokens


def test_samples_of_one_seed_differ_and_are_repeatable(client: OpenAI) -> None:
    first, again = (client.completions.create(model="toy", prompt=["a", "b"], n=3, seed=9) for _ in range(2))
    found = [choice.text for choice in first.choices]
    assert len(set(found)) == 6 and found == [choice.text for choice in again.choices]
    single = client.completions.create(model="toy", prompt=["a", "b"], seed=9)
    assert [choice.text for choice in single.choices] == [found[0], found[3]]
    assert first.usage is not None and first.usage.prompt_tokens == 4  # each prompt once, with its first token


def test_samples_without_a_seed_differ(client: OpenAI) -> None:
    made = client.completions.create(model="toy", prompt="a", n=4)
    assert len({choice.text for choice in made.choices}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(client: OpenAI, stream: bool) -> None:
    (expected,) = texts(["the in"], SamplingParams(seed=5, max_new_tokens=8))
    for prompt in ("the in", TOKENIZER.encode("the in", add_special_tokens=True)):
        made: Any = client.completions.create(
            model="toy", prompt=prompt, seed=5, max_tokens=8, echo=True, n=2, stream=stream
        )
        found = {0: "", 1: ""}
        for part in made if stream else [made]:
            for choice in part.choices:
                found[choice.index] += choice.text
        begin = "the in" if isinstance(prompt, str) else "<bos>the in"
        assert found[0] == begin + expected and found[1].startswith(begin) and found[1] != found[0]


def test_logprobs_are_those_of_the_engine(client: OpenAI) -> None:
    handle = make_engine(drafter=None).generate(["one"], SamplingParams(seed=5, max_new_tokens=12, logprobs=3))[0]
    made = client.completions.create(model="toy", prompt="one", seed=5, max_tokens=12, logprobs=3)
    found = made.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert found.tokens == [TOKENIZER.decode([token]) for token in handle.tokens]
    assert found.token_logprobs == pytest.approx([each.logprob for each in handle.logprobs])
    text = "".join(found.tokens)
    assert [text[at:][: len(token)] for at, token in zip(found.text_offset, found.tokens)] == found.tokens
    for top, own in zip(found.top_logprobs or [], handle.logprobs):
        assert top == pytest.approx({TOKENIZER.decode([token]): value for token, value in own.top})


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, stream: bool) -> None:
    """As evaluation programs ask for it: the first token has none, and offsets count from the start of the prompt."""
    params = SamplingParams(seed=5, max_new_tokens=6, logprobs=2, prompt_logprobs=2)
    handle = make_engine(drafter=None).generate(["the in"], params)[0]
    options: dict[str, Any] = {"seed": 5, "max_tokens": 6, "echo": True, "logprobs": 2, "stream": stream, "n": 2}
    made: Any = client.completions.create(model="toy", prompt=["a", "the in"], **options)
    found: dict[str, list[Any]] = {}
    other: list[Any] = []
    for part in made if stream else [made]:
        for choice in part.choices:
            if choice.index == 2:  # the first text of the second prompt
                for name, values in choice.logprobs.model_dump().items():
                    found.setdefault(name, []).extend(values)
            if choice.index == 3:
                other += choice.logprobs.token_logprobs
    assert handle.prompt_logprobs is not None
    tokens = [*handle.prompt, *handle.tokens]
    assert found["tokens"] == [TOKENIZER.decode([token]) for token in tokens]
    scored = [*handle.prompt_logprobs[1:], *handle.logprobs]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx([each.logprob for each in scored if each])
    for top, own in zip(found["top_logprobs"][1:], scored, strict=True):
        assert own is not None and top == pytest.approx({TOKENIZER.decode([token]): value for token, value in own.top})
    text = "".join(found["tokens"][1:])  # the text of the prompt lacks the token that the tokenizer adds
    placed = list(zip(found["text_offset"], found["tokens"]))
    assert placed[0] == (0, "<bos>") and all(text[at:].startswith(token) for at, token in placed[1:])
    assert other[: len(handle.prompt)] == found["token_logprobs"][: len(handle.prompt)]


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_follows_an_echoed_prompt_with_max_tokens_0(client: OpenAI, stream: bool) -> None:
    """The scores are those of a request with tokens. Grammars and stop strings have no text to change."""
    options: dict[str, Any] = {"prompt": ["a", "the in"], "echo": True, "logprobs": 2, "n": 2}
    want = client.completions.create(model="toy", seed=5, max_tokens=3, **options)
    extra = {"stop": ["the"], "response_format": {"type": "json_object"}}
    made: Any = client.completions.create(model="toy", max_tokens=0, stream=stream, extra_body=extra, **options)
    parts = list(made) if stream else [made]
    choices = sorted((choice for part in parts for choice in part.choices), key=lambda choice: choice.index)
    assert [choice.text for choice in choices] == ["a", "a", "the in", "the in"]
    assert [choice.finish_reason for choice in choices] == ["length"] * 4
    for choice, with_text in zip(choices, want.choices, strict=True):
        count = len(TOKENIZER.encode(options["prompt"][choice.index // 2], add_special_tokens=True))
        longer = with_text.logprobs.model_dump() if with_text.logprobs else {}
        assert choice.logprobs.model_dump() == {name: values[:count] for name, values in longer.items()}
        assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == count > 1
    if not stream:
        assert (made.usage.completion_tokens, made.usage.total_tokens) == (0, made.usage.prompt_tokens)


def test_max_tokens_0_without_scores(client: OpenAI, served: Running) -> None:
    made = client.completions.create(model="toy", prompt="the in", max_tokens=0, echo=True)
    assert made.choices[0].text == "the in" and made.choices[0].logprobs is None
    body = {"prompt": "one", "max_tokens": 0, "prompt_logprobs": 1}
    (choice,) = served.post("completions", body).json()["choices"]
    assert choice["text"] == "" and len(choice["prompt_logprobs"]) == len(
        TOKENIZER.encode("one", add_special_tokens=True)
    )


def test_prompt_logprobs_have_the_form_of_vllm(served: Running) -> None:
    params = SamplingParams(seed=5, max_new_tokens=2, prompt_logprobs=3)
    (handle,) = make_engine(drafter=None).generate(["one"], params)
    body = {"prompt": "one", "seed": 5, "max_tokens": 2, "prompt_logprobs": 1}
    (choice,) = served.post("completions", body).json()["choices"]
    assert handle.prompt_logprobs is not None and choice["prompt_logprobs"][0] is None
    for own, each in zip(handle.prompt_logprobs[1:], choice["prompt_logprobs"][1:], strict=True):
        assert own is not None and each[str(own.token)]["logprob"] == pytest.approx(own.logprob)
        best, value = own.top[0]
        shown = {"logprob": pytest.approx(value), "rank": 1, "decoded_token": TOKENIZER.decode([best])}
        assert each[str(best)] == shown and len(each) == 2 - (best == own.token)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 0}
    answer = served.post("chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    alone = served.post("chat/completions", {**chat, "max_tokens": 0}).json()
    assert alone["prompt_logprobs"] == answer["prompt_logprobs"] and alone["usage"]["completion_tokens"] == 0
    refused = served.post("completions", {**body, "stream": True})
    assert refused.status_code == 400 and "prompt_logprobs: got a stream" in refused.json()["error"]["message"]


def test_words_and_ngrams_are_forbidden(served: Running) -> None:
    body: dict[str, Any] = {"prompt": "one", "seed": 5, "max_tokens": 30}
    text = served.post("completions", body).json()["choices"][0]["text"]
    other = served.post("completions", {**body, "bad_words": [text[2:4]]}).json()["choices"][0]["text"]
    params = SamplingParams(seed=5, max_new_tokens=30, bad_words=[text[2:4]])
    assert texts(["one"], params) == [other] != [text] and text[2:4] not in other
    single = served.post("completions", {**body, "no_repeat_ngram_size": 1}).json()["choices"][0]["text"]
    assert texts(["one"], SamplingParams(seed=5, max_new_tokens=30, no_repeat_ngram_size=1)) == [single] != [text]
    assert served.post("completions", {**body, "bad_words": [""]}).status_code == 400
    assert served.post("completions", {**body, "bad_words": "one"}).status_code == 422


def test_logprobs_of_a_stream_are_those_of_a_whole_text(client: OpenAI) -> None:
    whole = client.completions.create(model="toy", prompt="one", seed=5, max_tokens=30, logprobs=2).choices[0].logprobs
    parts = client.completions.create(model="toy", prompt="one", seed=5, max_tokens=30, logprobs=2, stream=True)
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.choices[0].logprobs.model_dump().items():
            joined.setdefault(name, []).extend(values)
    assert whole is not None and joined == whole.model_dump()


def test_streams_end_with_the_usage_that_was_asked_for(client: OpenAI) -> None:
    parts = list(
        client.completions.create(
            model="toy", prompt="one", seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [part.usage is None for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[-1].choices == [] and parts[-1].usage is not None and parts[-1].usage.completion_tokens == 16
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
    assert len({part.id for part in parts}) == 1
    silent = list(client.completions.create(model="toy", prompt="one", seed=5, stream=True))
    assert all(part.usage is None and part.choices for part in silent)


@pytest.mark.parametrize("route", ["completions", "chat.completions"])
def test_every_event_may_have_the_usage_so_far(client: OpenAI, route: str) -> None:
    given: Any = {"prompt": "one"} if route == "completions" else {"messages": [{"role": "user", "content": "one"}]}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    create: Any = attrgetter(route)(client).create
    parts = list(create(model="toy", **given, seed=5, max_tokens=16, stream=True, stream_options=options))
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts) and counts[-2:] == [16, 16] and parts[-1].choices == []


def test_special_tokens(served: Running) -> None:
    """Before the prompt, and in the text."""
    body = {"prompt": "a", "max_tokens": 1, "seed": 1}
    counts = [
        served.post("completions", {**body, "add_special_tokens": adds}).json()["usage"]["prompt_tokens"]
        for adds in (None, True, False)
    ]
    assert counts == [2, 2, 1]
    turn = TOKENIZER.convert_tokens_to_ids("<|end|>")
    body |= {"logit_bias": {str(turn): 100}}
    texts = [
        served.post("completions", {**body, "skip_special_tokens": skips}).json()["choices"][0]["text"]
        for skips in (None, True, False)
    ]
    assert texts == ["", "", "<|end|>"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_may_stay(client: OpenAI, stream: bool) -> None:
    (text,) = texts(["one"], SamplingParams(seed=5, max_new_tokens=30))
    stop = text[10:13]
    made: Any = client.completions.create(
        model="toy",
        prompt="one",
        seed=5,
        max_tokens=30,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": True},
    )
    found = "".join(part.choices[0].text for part in (made if stream else [made]))
    assert found == text[: text.index(stop) + 3]


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
