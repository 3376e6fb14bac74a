"""Sampling parameters of requests without any: followed, named or refused, as the argument `sampling` says."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import GenerationConfig

from specdec_fast import Engine, SamplingParams, load
from specdec_fast.loading.sampling_defaults import read_generation_config, unfollowed_settings
from specdec_fast.targets.tiny_models import tiny_model

PROMPT = [1, 2, 3]
SAMPLES = {"do_sample": True, "temperature": 0.6, "top_k": 1, "top_p": 0.9}


def opened(settings: dict[str, Any], **options: Any) -> Engine:
    model = tiny_model("llama", vocab_size=32)
    model.generation_config = GenerationConfig(**settings)
    return load(model, max_rows=2, max_length=64, **options)


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Records of the library; transformers has warnings of its own."""
    return [record for record in caplog.records if record.name == "specdec_fast"]


def greedy(engine: Engine, count: int) -> list[int]:
    return engine.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=count))[0].tokens


def test_the_model_s_settings_are_followed_where_nothing_else_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = opened({**SAMPLES, "max_new_tokens": 9}, sampling="model")
    assert engine.default_params == SamplingParams(temperature=0.6, top_k=1, top_p=0.9, max_new_tokens=9)
    first, second = engine.generate([PROMPT, PROMPT])
    chosen = engine.submit(PROMPT)
    while not chosen.finished:
        engine.step()
    assert first.tokens == second.tokens == chosen.tokens == greedy(engine, 9), "top_k=1 leaves one token"
    assert first.params.seed != second.params.seed
    own = engine.generate([PROMPT], SamplingParams(max_new_tokens=3, seed=1))[0]
    assert own.params.temperature == 1.0 and own.params.top_k == 0, "parameters of a request replace all of them"
    assert not said(caplog)


def test_neutral_defaults_are_kept_and_what_they_leave_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = opened(SAMPLES)
    assert engine.default_params == SamplingParams()
    engine.generate([PROMPT], None)
    (record,) = said(caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "the model's generation_config sets temperature=0.6, top_k=1, top_p=0.9, which requests do not follow: pass "
        "sampling='model' to load to follow it, or sampling=SamplingParams() for neutral"
    )


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}])
def test_a_model_without_settings_of_its_own_is_opened_silently(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(settings).default_params == opened(settings, sampling="model").default_params == SamplingParams()
    assert not said(caplog)


def test_given_parameters_are_the_defaults(caplog: pytest.LogCaptureFixture) -> None:
    given = SamplingParams(temperature=0, max_new_tokens=5)
    engine = opened(SAMPLES, sampling=given)
    (handle,) = engine.generate([PROMPT])
    assert engine.default_params is given and handle.tokens == greedy(engine, 5) and not said(caplog)


@pytest.mark.parametrize("sampling", ["Model", "neutral", {"temperature": 0}, 0.5, True])
def test_other_values_are_refused_before_anything_is_loaded(sampling: Any) -> None:
    with pytest.raises(ValueError, match=r'sampling: got .*; expected None, "model" or SamplingParams'):
        load("nowhere/at-all", sampling=sampling)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
         {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": 0.7}, {"temperature": 0.7}),  # without do_sample
        ({"top_k": -1}, {}),
        ({"min_p": 0.1, "top_k": 0, "min_new_tokens": 2}, {"min_p": 0.1, "min_new_tokens": 2}),
        ({"suppress_tokens": [4, 5]}, {"banned_token_ids": (4, 5)}),
        ({"suppress_tokens": [4], "bad_words_ids": [[6], [2], [7, 8]]},
         {"banned_token_ids": (4, 6), "bad_words": ((7, 8),)}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"sequence_bias": {(6,): -1.0, (7, 8): 3.0}}, {"logit_bias": {6: -1.0}}),
        ({"sequence_bias": [[[6], -1.0]]}, {"logit_bias": {6: -1.0}}),
        ({"stop_strings": ["END"]}, {"stop": ["END"]}),
        ({"eos_token_id": 2, "pad_token_id": 0, "use_cache": False, "num_beams": 1}, {}),
    ],
)  # fmt: skip
def test_settings_become_parameters(settings: dict[str, Any], found: dict[str, Any]) -> None:
    assert read_generation_config(GenerationConfig(**settings), eos_ids=(2,))[0] == found
    SamplingParams(**found)


def test_a_model_may_have_no_generation_config() -> None:
    assert read_generation_config(None) == ({}, []) and unfollowed_settings(None) == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"typical_p": 0.5, "top_h": 0.4}, "typical_p=0.5, top_h=0.4"),
        ({"forced_bos_token_id": 3, "forced_eos_token_id": 2}, "forced_bos_token_id=3, forced_eos_token_id=2"),
        ({"begin_suppress_tokens": [3]}, "begin_suppress_tokens=[3]"),
        ({"sequence_bias": {(7, 8): 3.0}}, "sequence_bias of several tokens"),
    ],
)
def test_settings_that_cannot_be_followed_are_named(
    settings: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(settings, sampling="model")
    (record,) = said(caplog)
    assert f"generation_config sets {words}, which is not supported and ignored" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 1.5}, "SamplingParams.top_p: got 1.5"),
        ({"min_new_tokens": 500}, "SamplingParams.min_new_tokens: got 500"),
        ({"suppress_tokens": [99]}, "banned_token_ids: got 99; expected ids below 32"),
    ],
)
def test_impossible_settings_are_refused_where_they_are_asked_for(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(
        ValueError, match=rf"sampling: got 'model', whose generation_config cannot be followed \({words}"
    ):
        opened(settings, sampling="model")
    assert opened(settings).default_params == SamplingParams()


def test_given_defaults_fit_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="banned_token_ids: got 99; expected ids below 32"):
        opened({}, sampling=SamplingParams(banned_token_ids=(99,)))
