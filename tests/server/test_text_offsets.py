"""Offsets of tokens never fall and are at most the text's length, whatever characters and stop strings do."""

from __future__ import annotations

from typing import Any

import pytest
from oracles.toy_server import TOKENIZER, Running

from specdec_fast.server.text_offsets import TextOffsets, split_released

ODD = [*TOKENIZER.encode("é€", add_special_tokens=False), *TOKENIZER.encode("a", add_special_tokens=False)]
"""The bytes of three characters, which a text may have in any order."""


def read(served: Running, stream: bool, **body: Any) -> tuple[str, dict[str, list[Any]]]:
    """A text and its log-probabilities. Those of a chunk must be inside of the text until then."""
    made: Any = served.client().completions.create(model="toy", stream=stream, **body)
    text, found = "", dict[str, list[Any]]()
    for part in made if stream else [made]:
        (choice,) = part.choices
        text += choice.text
        for name, values in choice.logprobs.model_dump().items():
            found.setdefault(name, []).extend(values)
        assert max(found["text_offset"], default=0) <= len(text)
    assert len({*map(len, found.values())}) == 1
    return text, found


def test_tokens_of_one_character_share_its_offset() -> None:
    text = "aé€ b"
    offsets = TextOffsets(TOKENIZER, (), True, start=10)
    found = [offsets.add(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert found == [10, 11, 11, 12, 12, 12, 13, 14]


def test_tokens_of_text_that_is_held_back_wait_for_it() -> None:
    waiting: Any = [(5, None, 0), (6, None, 2), (7, None, 3)]
    assert split_released(waiting, 2, ended=False) == (waiting[:2], waiting[2:])
    assert split_released(waiting, 2, ended=True) == ([(5, None, 0), (6, None, 2), (7, None, 2)], [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_characters(served: Running, stream: bool, seed: int) -> None:
    bias = {str(token): 100 for token in ODD}
    text, found = read(served, stream, prompt="one", seed=seed, max_tokens=40, logprobs=1, logit_bias=bias)
    assert len(found["tokens"]) == 40 and sum(map(len, found["tokens"])) > len(text), "some are parts of a character"
    assert found["text_offset"] == sorted(found["text_offset"])
    for at, token in zip(found["text_offset"], found["tokens"]):
        assert "\ufffd" in token or text[at:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["é€é", TOKENIZER.encode("é€é"), "one <bos>é"])
def test_a_prompt_of_such_characters_is_echoed(served: Running, stream: bool, prompt: Any) -> None:
    text, found = read(served, stream, prompt=prompt, seed=1, max_tokens=3, logprobs=1, echo=True)
    given = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    assert text.startswith(given) and "\ufffd" not in given
    assert found["text_offset"] == sorted(found["text_offset"])
    assert [text[at:][: len(token)] for at, token in zip(found["text_offset"][-3:], found["tokens"][-3:])] == found[
        "tokens"
    ][-3:]
    for at, token in zip(found["text_offset"], found["tokens"]):
        assert "\ufffd" in token or token.startswith("<") or text[at:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_special_token_of_a_prompt(served: Running, stream: bool) -> None:
    """The text has the special token that it was given, and lacks the one that the tokenizer adds."""
    prompt = "one <bos>two"
    text, found = read(served, stream, prompt=prompt, seed=1, max_tokens=1, logprobs=1, echo=True)
    inside = TOKENIZER.encode(prompt, add_special_tokens=False)
    offsets, tokens = found["text_offset"], found["tokens"]
    assert text.startswith(prompt) and len(offsets) == len(TOKENIZER.encode(prompt)) + 1 > len(inside) + 1
    assert offsets[0] == 0 and all(text[at:].startswith(token) for at, token in list(zip(offsets, tokens))[1:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_a_stop_string_cuts(served: Running, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "one", "seed": 3, "max_tokens": 24, "logprobs": 0}
    whole, all_tokens = read(served, stream, **body)
    text, found = read(served, stream, **body, stop=whole[10:13])
    assert text == whole[: whole.index(whole[10:13])] and len(text) < len(whole)
    assert found["tokens"] == all_tokens["tokens"][: len(found["tokens"])]
    assert max(found["text_offset"]) <= len(text) < sum(map(len, found["tokens"]))
