"""Models that targets give back: attention, modes, classes and memory layout are those of before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import Engine, SamplingParams
from specdec_fast.targets import load_checks
from specdec_fast.targets.attention import NAME
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.linear_layers import BatchInvariantLinear


def describe(model: Any) -> list[Any]:
    """All that a target changes in a model."""
    layers = [(type(each), each.weight.stride()) for each in model.modules() if isinstance(each, torch.nn.Linear)]
    modules = [(type(each), each.training) for each in model.modules()]
    return [model.config._attn_implementation, modules, layers]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_a_closed_target_gives_the_model_back(family: str, own: str) -> None:
    model = models.own(family)
    model.set_attn_implementation(own)
    text = models.own_text(model)
    model.train()
    model.get_input_embeddings().eval()  # modes are those of each module
    before, values = describe(model), {name: value.clone() for name, value in model.state_dict().items()}
    target = HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert describe(model) != before
    target.close()
    target.close()
    assert describe(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert models.own_text(model.eval()) == text


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_every_target_is_compared_with_the_model_as_it_came(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attention rounds differently: the fused passes of a second target were refused in half precision."""
    model, seen = models.own("llama"), []
    model.set_attn_implementation(own)
    own_logits = load_checks.own_logits

    def watched(model: Any, sample: torch.Tensor) -> torch.Tensor:
        seen.append(model.config._attn_implementation)
        return own_logits(model, sample)

    monkeypatch.setattr(load_checks, "own_logits", watched)
    targets = [HuggingFaceTarget(model, max_rows=1, max_length=32) for _ in range(2)]
    assert seen == [own, own]
    for target in targets:
        target.close()
    assert model.config._attn_implementation == own


def test_the_last_of_several_targets_gives_the_model_back() -> None:
    model = models.own("llama")
    before = describe(model)
    first, second = (HuggingFaceTarget(model, max_rows=1, max_length=32) for _ in range(2))
    first.close()
    changed = describe(model)
    assert changed != before and type(model.lm_head) is BatchInvariantLinear, "another target works with it"
    second.close()
    assert describe(model) == before
    third = HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert describe(model) == changed
    third.close()
    assert describe(model) == before


def test_a_target_that_nothing_refers_to_gives_the_model_back() -> None:
    model = models.own("llama")
    before, text = describe(model), models.own_text(model)
    target = HuggingFaceTarget(model, max_rows=1, max_length=32)
    del target
    gc.collect()
    assert describe(model) == before and models.own_text(model) == text


def test_a_model_disappears_with_its_target() -> None:
    model = models.own("llama")
    target, seen = HuggingFaceTarget(model, max_rows=1, max_length=32), weakref.ref(model)
    target.lease.release_explicitly()
    del model, target
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ValueError])
def test_a_target_that_cannot_be_opened_gives_the_model_back(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.own("llama").train()
    before = describe(model)

    def fail(*_: object) -> None:
        raise error("no")

    monkeypatch.setattr("specdec_fast.targets.huggingface.HuggingFaceTarget._choose_forward", fail)
    with pytest.raises(error):
        HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert describe(model) == before


def test_attention_is_lent_between_passes() -> None:
    """The model's own forward works until the next pass, with the attention that was set last."""
    model = models.own("llama")
    text = models.own_text(model)
    with Engine(HuggingFaceTarget(model, max_rows=2, max_length=32)) as engine:
        expected = engine.generate([[3, 4, 5]], SamplingParams(temperature=0, max_new_tokens=8))[0].tokens
        for own in ("sdpa", "eager"):
            engine.target.lease.lend_attention()  # type: ignore[attr-defined]
            model.set_attn_implementation(own)
            assert models.own_text(model) == text
            assert engine.generate([[3, 4, 5]], SamplingParams(temperature=0, max_new_tokens=8))[0].tokens == expected
            assert model.config._attn_implementation == NAME
            engine.target.lease.lend_attention()  # type: ignore[attr-defined]
            assert model.config._attn_implementation == own
