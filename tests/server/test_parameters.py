"""Fields of requests become the parameters of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from oracles.toy_server import make_engine

from specdec_fast import SamplingParams
from specdec_fast.server.parameters import read_params, repeat
from specdec_fast.server.schemas import CompletionRequest
from specdec_fast.server.settings import Settings

ENGINE = make_engine()
BAD_WORDS = SamplingParams(bad_words=["one", [4, 5]]).with_bad_word_ids(ENGINE.tokenizer).bad_words


def params(**fields: Any) -> SamplingParams:
    request = CompletionRequest.model_validate({"prompt": "one", **fields})
    request.check_fields()
    return read_params(request, ENGINE, max_tokens=16, logprobs=None)


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"),
    [
        ("temperature", 0.5, "temperature", 0.5),
        ("temperature", 0, "temperature", 0),
        ("temperature", 1e-8, "temperature", 0),  # of clients that may not send 0
        ("temperature", 0.001, "temperature", 0.001),
        ("top_p", 0.9, "top_p", 0.9),
        ("top_k", 7, "top_k", 7),
        ("top_k", -1, "top_k", 0),
        ("min_p", 0.1, "min_p", 0.1),
        ("seed", 3, "seed", 3),
        ("stop", "a", "stop", ("a",)),
        ("stop", ["a", "b"], "stop", ("a", "b")),
        ("stop_token_ids", [4, 5], "stop_token_ids", (4, 5)),
        ("presence_penalty", 1.5, "presence_penalty", 1.5),
        ("frequency_penalty", -1, "frequency_penalty", -1),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("logit_bias", {"17": -100, "4": 2.5}, "logit_bias", {17: -100, 4: 2.5}),
        ("ignore_eos", True, "ignore_eos", True),
        ("min_tokens", 4, "min_new_tokens", 4),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
        ("no_repeat_ngram_size", 3, "no_repeat_ngram_size", 3),
        ("bad_words", ["one", [4, 5]], "bad_words", BAD_WORDS),
        ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ],
)
def test_every_field_is_read(field: str, value: Any, name: str, expected: Any) -> None:
    assert getattr(params(**{field: value}), name) == expected
    assert getattr(params(**{field: None}), name) == getattr(params(), name)


def test_defaults_are_those_of_the_api() -> None:
    assert params() == SamplingParams(max_new_tokens=16)  # temperature 1, nothing filtered


def test_defaults_of_the_engine_hold_where_a_field_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "default_params", SamplingParams(temperature=0.6, top_k=20, stop=("x",)))
    assert params(top_k=3, min_p=None) == SamplingParams(temperature=0.6, top_k=3, stop=("x",), max_new_tokens=16)


def test_seeds_of_samples() -> None:
    request = CompletionRequest.model_validate({"prompt": "one", "n": 4})
    seeded = [each.seed for each in repeat(request, [1, 2], SamplingParams(seed=7)).params]
    assert seeded[0] == 7 and len(set(seeded)) == 4
    assert seeded == [each.seed for each in repeat(request, [1, 2], SamplingParams(seed=7)).params]
    assert seeded[1:] != [each.seed for each in repeat(request, [1, 3], SamplingParams(seed=7)).params][1:]
    assert [each.seed for each in repeat(request, [1, 2], SamplingParams()).params] == [None] * 4


def test_the_library_of_grammars_is_a_setting() -> None:
    pytest.importorskip("xgrammar")
    from specdec_fast.integrations.xgrammar import XGrammarMatcher

    request = CompletionRequest.model_validate({"prompt": "one", "response_format": {"type": "json_object"}})
    found = read_params(request, ENGINE, max_tokens=16, logprobs=None, grammar_backend="xgrammar")
    assert isinstance(found.grammar, XGrammarMatcher)
    with pytest.raises(ValueError, match=r"grammar_backend: got 'outlines'; expected one of"):
        Settings("toy", grammar_backend="outlines")


def test_one_text_scores_the_prompt() -> None:
    request = CompletionRequest.model_validate({"prompt": "one", "n": 3})
    for seed in (None, 7):
        texts = repeat(request, [1, 2], SamplingParams(seed=seed, prompt_logprobs=1)).params
        assert [each.prompt_logprobs for each in texts] == [1, None, None]
