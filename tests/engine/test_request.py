"""Handle: tokens that are kept of a step, origins of tokens, ends."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from oracles.automaton import AutomatonTarget, random_logits
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_fast import Engine, HuggingFaceTarget
from specdec_fast.engine.request import Handle, pair_with_params
from specdec_fast.engine.stop_conditions import StopChecker
from specdec_fast.sampling.params import SamplingParams


def handle(max_new_tokens: int = 100, eos: tuple[int, ...] = ()) -> Handle:
    made = Handle(3, [1, 2], SamplingParams(max_new_tokens=max_new_tokens, seed=7), 4)
    made.checker = StopChecker(None, [1, 2], eos_ids=eos, stop=(), max_new_tokens=max_new_tokens, max_length=1000)
    return made


def test_origins_tell_where_each_token_came_from() -> None:
    made = handle()
    assert made.append_step([5, 6, 7], 2, 2, 2) == [5, 6, 7]
    assert made.append_step([5, 8], 1, 4, 2) == [5, 8]
    assert made.append_step([9], 0, 0, 0) == [9]
    assert made.origins == ["accepted", "accepted", "bonus", "accepted", "recovered", "plain"]
    assert made.tokens == [5, 6, 7, 5, 8, 9] and not made.finished
    assert made.stats.new_tokens == 6 and made.stats.steps == 3 and made.stats.num_draft_tokens == 6


def test_tokens_after_an_end_inside_an_accepted_run_are_dropped() -> None:
    made = handle(eos=(6,))
    assert made.append_step([5, 6, 7, 8], 3, 3, 3) == [5, 6]
    assert made.finish_reason == "eos" and made.tokens == [5, 6] and made.origins == ["accepted"] * 2
    assert made.stats.new_tokens == 2


def test_the_length_limit_cuts_a_run() -> None:
    made = handle(max_new_tokens=2)
    assert made.append_step([5, 6, 7], 2, 2, 2) == [5, 6] and made.finish_reason == "length"


def test_ending_from_outside() -> None:
    made = handle()
    made.append_step([5], 0, 0, 0)
    made.finish("error", ValueError("why"))
    assert made.finished and made.finish_reason == "error" and made.tokens == [5]
    read = json.loads(json.dumps(made.as_dict()))
    assert read["error"] == "why" and read["seed"] == 7 and read["tokens"] == [5] and read["stats"]["steps"] == 1


def test_handles_and_engines_are_short_when_printed() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, max_rows=1))
    assert repr(engine) == "Engine(rule replay, drafter none, cpu; 0 running, 0 queued)"
    handles = [engine.submit([1], SamplingParams(max_new_tokens=40)) for _ in range(2)]
    engine.step()
    assert repr(handles[0]).startswith("Handle(0, running, 1 token, [")
    assert repr(handles[1]) == "Handle(1, queued, 0 tokens, [])" and repr(engine).endswith("; 1 running, 1 queued)")
    engine.cancel(handles[1])
    (ended,) = engine.generate([[2]], SamplingParams(max_new_tokens=40))
    assert repr(ended).startswith("Handle(2, length, 40 tokens, [") and len(repr(ended)) < 100
    (refused,) = engine.generate([[99]])
    assert repr(refused).startswith("Handle(-1, error, 0 tokens, ValueError(")
    with_text = handle()
    with_text.checker = SimpleNamespace(text="The capital of France is Paris, and so on")  # type: ignore[assignment]
    assert repr(with_text) == "Handle(3, queued, 0 tokens, 'The capital ...is, and so on')"


def test_a_refused_request_has_no_text() -> None:
    refused = Handle(-1, [], SamplingParams(), 0)
    refused.finish("error", ValueError("no"))
    assert refused.text == "" and refused.finished


def test_prompts_and_parameters_in_pairs() -> None:
    hot, cold = SamplingParams(), SamplingParams(temperature=0)
    assert pair_with_params(iter([[1], [2]]), iter([hot, cold])) == [([1], hot), ([2], cold)]
    assert pair_with_params([[1], [2]], cold) == [([1], cold), ([2], cold)]
    with pytest.raises(ValueError, match="params: got 1 for 2 prompts; expected one, or one per prompt"):
        pair_with_params([[1], [2]], [hot])
    with pytest.raises(ValueError, match=r"prompts: got one text, 'abc'; expected a list of prompts; pass \[text\]"):
        pair_with_params("abc", hot)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": 0, "top_k": 4}, r"expected SamplingParams, or one for each prompt; pass SamplingParams\("),
        ("temperature=0", "params: got 'temperature=0'; expected SamplingParams, or one for each prompt"),
        (0, "params: got 0; expected SamplingParams, or one for each prompt"),
    ],
)
def test_parameters_that_are_no_list_are_refused_at_once(params: object, words: str) -> None:
    """As many keys as prompts: each key would be taken for the parameters of a prompt."""
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, max_rows=3))
    with pytest.raises(ValueError, match=words):
        engine.generate([[1], [2]], params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"params: got .*; expected SamplingParams, or None for the defaults"):
        engine.submit([1], params)  # type: ignore[arg-type]
    assert engine.idle


def test_a_batch_with_errors_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, max_rows=3))
    params = SamplingParams(max_new_tokens=2)
    engine.generate([[1], [2]], params)
    assert not caplog.records
    engine.generate([[1], [99], [1] * 5000], params)
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of 3 prompts ended with an error (Handle.error); prompt 1: prompt: got ")


def test_parameters_of_another_kind_are_refused_alone() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, max_rows=3))
    good, bad = engine.generate([[1], [2]], [SamplingParams(max_new_tokens=2), {"temperature": 0}])  # type: ignore[list-item]
    assert good.finish_reason == "length" and bad.finish_reason == "error"
    assert "params: got {'temperature': 0}; expected SamplingParams" in str(bad.error) and bad.as_dict()["error"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "4096, which is the default of load; pass max_length to load up to 8192, the model's own limit, or"),
        (64, "64, which is max_length; raise it up to 8192, the model's own limit, or shorten the prompt"),
        (8192, "8192, which is the model's own; shorten it"),
        (10_000, "8192, which is the model's own; shorten it"),
    ],
)
def test_a_prompt_beyond_the_context_says_which_limit_it_meets(given: int | None, words: str) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8192,
    )
    target = HuggingFaceTarget(LlamaForCausalLM(config), max_rows=1, max_length=given)
    with pytest.raises(ValueError, match=re.escape(f"expected fewer than the context limit of {words}")):
        Engine(target).submit([1] * 9000)


def test_a_limit_of_another_target_is_named_without_its_origin() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), max_length=16))
    words = (
        "prompt: got 16 tokens; expected fewer than the context limit of 16, which is max_length; raise it, or shorten"
    )
    with pytest.raises(ValueError, match=words):
        engine.submit([1] * 16)


def test_a_request_beyond_the_pool_names_its_size() -> None:
    engine = Engine(AutomatonTarget(random_logits(23, 8, seed=2), page_size=4, num_pages=4))
    message = (
        "request: 30 tokens need 8 pages of the cache; the pool has 3; lower max_new_tokens, or raise num_pages of load"
    )
    with pytest.raises(ValueError, match=message):
        engine.submit([1] * 10, SamplingParams(max_new_tokens=20))
