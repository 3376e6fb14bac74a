"""Weights stored for products of few rows: the model computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_fast.loading import load_model
from specdec_fast.targets import linear_layers
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.linear_layers import BatchInvariantLinear, store_by_input
from specdec_kernels import use_backend
from specdec_kernels.dispatch import extension


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def test_values_are_kept_and_only_unshared_weights_move() -> None:
    model = load_model("demo-draft")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store_by_input(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    strides = {name: module.weight.stride() for name, module in linears(model).items()}
    tied = strides.pop("lm_head")
    assert tied == (model.config.hidden_size, 1), "the tied embedding is read by row"
    assert strides
    assert all(stride[0] == 1 for stride in strides.values()), strides
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_uses_our_kernel_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pairs: bool, fast: bool
) -> None:
    """bfloat16 always, float16 where torch has no instructions. `pairs`: the processor multiplies pairs of bfloat16."""
    monkeypatch.setattr(linear_layers, "has_instructions", lambda asked: asked != dtype or fast)
    monkeypatch.setattr(linear_layers, "stores_by_input", lambda asked: asked != torch.bfloat16 or not pairs)
    model, untouched = load_model("demo-draft", dtype), load_model("demo-draft", dtype)
    store_by_input(model)
    built = extension.unavailable_reason() is None
    ours = built and (dtype == torch.bfloat16 or not fast)
    assert {type(module) is BatchInvariantLinear for module in linears(model).values()} == {ours}
    strides = [module.weight.stride(0) for name, module in linears(model).items() if name != "lm_head"]
    moves = (not pairs or dtype != torch.bfloat16) if ours else fast
    assert all((stride == 1) == moves for stride in strides), strides
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, untouched(tokens).logits, rtol=0.05, atol=0.15)
        if ours:  # the same bits for any number of rows
            layer = model.model.layers[0].mlp.up_proj
            some = torch.randn(5, layer.in_features, dtype=dtype)
            assert torch.equal(layer(some)[:2], layer(some[:2]))


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="CPU extension not built")
def test_without_the_kernel_weights_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "has_instructions", lambda asked: asked != torch.bfloat16)
    model = load_model("demo-draft", "bfloat16")
    with use_backend("reference"):
        store_by_input(model)
    assert all(type(module) is torch.nn.Linear for module in linears(model).values())
    assert all(module.weight.stride(1) == 1 for module in linears(model).values())


def test_a_second_time_changes_nothing() -> None:
    model = load_model("demo-draft")
    store_by_input(model)
    before = {name: module.weight.stride() for name, module in linears(model).items()}
    store_by_input(model)
    assert {name: module.weight.stride() for name, module in linears(model).items()} == before


def test_a_target_changes_the_layout_and_the_model_can_still_be_saved(tmp_path: Path) -> None:
    model = load_model("demo-draft")
    tokens = torch.arange(1, 9)[None]
    with torch.inference_mode():
        own = model(tokens).logits
    target = HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert model is target.model and model.model.layers[0].mlp.up_proj.weight.stride(0) == 1
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, own, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_stored_model_can_be_trained_and_cast() -> None:
    """A target's change of layers keeps gradients and autocast."""
    model, untouched = load_model("demo-draft"), load_model("demo-draft")
    store_by_input(model)
    tokens = torch.arange(1, 9)[None]
    for each in (model, untouched):
        each(tokens, labels=tokens).loss.backward()
    for (name, parameter), own in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert parameter.grad is not None and own.grad is not None, name
        torch.testing.assert_close(parameter.grad, own.grad, rtol=1e-3, atol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(tokens).logits, untouched(tokens).logits, rtol=0.05, atol=0.3)
