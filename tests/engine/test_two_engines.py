"""Two engines in one process: in threads, over two models or over one, with failures in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.threads import together

from specdec_fast import Engine, SamplingParams, load

PROMPTS = [models.prompt(length) for length in (5, 17, 40)]
PARAMS = [SamplingParams(temperature=t, seed=3, max_new_tokens=24) for t in (0, 0.7, 1)]
SHARED: dict[str, Any] = {"max_rows": 3, "max_length": 128}


def tokens(engine: Engine) -> list[list[int]]:
    return [handle.tokens for handle in engine.generate(PROMPTS, PARAMS)]


def hooks(model: Any) -> list[Any]:
    """The hooks of a model without those that transformers leaves there once a caller asked for hidden states."""
    every = [
        hook for each in model.modules() for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())
    ]
    return [each for each in every if not str(getattr(each, "__module__", "")).startswith("transformers.")]


def check_given_back(model: Any) -> None:
    """Nothing of an engine is left, and transformers uses the model as before."""
    assert hooks(model) == []
    ids = torch.tensor([PROMPTS[0]])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, pad_token_id=0)
    assert own[0, len(PROMPTS[0]) :].tolist() == models.greedy_text("llama", len(PROMPTS[0]), 8)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return tokens(load(models.own("llama"), drafter="none", **SHARED))


def test_engines_of_two_models_run_at_the_same_time(wanted: list[list[int]]) -> None:
    engines = [
        load(models.own("llama"), drafter="suffix", **SHARED),
        load(models.own("llama"), models.kin("llama"), **SHARED),
    ]
    for _ in range(3):
        assert together(*(lambda each=each: tokens(each) for each in engines)) == [wanted, wanted]


@pytest.mark.parametrize("other", ["recycling", "layer_skip"])
@pytest.mark.parametrize("fused", [True, False])
def test_engines_of_one_model_run_at_the_same_time(
    wanted: list[list[int]], fused: bool, other: str, tmp_path: Any
) -> None:
    """One reads hidden states by hooks where passes are not fused, the other changes hooks or modules too."""
    model = models.own("llama")
    head = {"drafter": "eagle3", "drafter_options": heads.options("eagle3", tmp_path)}
    with (
        load(model, drafter=other, fused_forward=fused, **SHARED) as first,
        load(model, fused_forward=fused, **head, **SHARED) as second,
    ):
        for _ in range(5):
            assert together(lambda: tokens(first), lambda: tokens(second)) == [wanted, wanted]
        assert hooks(model) == []
    check_given_back(model)


class Raises:
    """A logits processor that fails at a length."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, text: Any, logits: Any) -> Any:
        if len(text) > len(PROMPTS[1]) + 5:
            raise self.error("planted")
        return logits


def interrupted(engine: Engine) -> None:
    with pytest.raises(KeyboardInterrupt):
        engine.generate(
            PROMPTS[1:2],
            SamplingParams(logits_processors=(Raises(KeyboardInterrupt),), max_new_tokens=30, ignore_eos=True),
        )


def failing(engine: Engine) -> None:
    params = SamplingParams(logits_processors=(Raises(KeyError),), max_new_tokens=30, ignore_eos=True)
    (handle,) = engine.generate(PROMPTS[1:2], params)
    assert handle.finish_reason == "error" and "KeyError: 'planted'" in str(handle.error)


def left(engine: Engine) -> None:
    handle = engine.submit(PROMPTS[1], PARAMS[1])
    stream = engine.stream(handle)
    for _ in range(3):
        engine.step()
    del stream
    engine.step()
    assert handle.finish_reason == "cancelled"


@pytest.mark.parametrize("fault", [interrupted, failing, left])
def test_a_fault_in_one_engine_leaves_the_other_and_the_model_alone(
    wanted: list[list[int]], fault: Callable[[Engine], None]
) -> None:
    model = models.own("llama")
    with (
        load(model, drafter="ngram", fused_forward=False, **SHARED) as first,
        load(model, drafter="lookahead", fused_forward=False, **SHARED) as second,
    ):
        found = together(lambda: [fault(first) for _ in range(3)], lambda: [tokens(second) for _ in range(2)])
        assert found == [[None] * 3, [wanted, wanted]], found
        assert first.idle and first.state.num_free == SHARED["max_rows"]
        first.reset_prefix_cache()
        assert first.target.cache.pages.num_used == 0
        assert tokens(first) == wanted
    check_given_back(model)
