"""A model that could not be opened is as it was, whatever ended the attempt, and wherever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast.targets import huggingface, load_checks
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_state import ModelState, unchanged_on_error
from specdec_fast.targets.tiny_models import tiny_model


def describe(model: Any) -> list[Any]:
    """All that may have changed."""
    modules = list(model.modules())
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) + ("forward" in vars(each)) for each in modules]
    linear = [(type(each), each.weight.stride()) for each in modules if isinstance(each, torch.nn.Linear)]
    return [
        model.config.to_dict(),
        model.config._attn_implementation,
        [each.training for each in modules],
        hooks,
        linear,
        [type(each) for each in modules],
    ]


STAGES = [
    (load_checks, "own_logits"),
    (load_checks, "observe"),
    (huggingface, "find_mask_rules"),
    (load_checks, "check_independence"),
    (load_checks, "check_logits"),
    (huggingface, "make_cache"),
    (huggingface, "find_output_scaling"),
    (huggingface, "store_by_input"),
    (huggingface, "with_batch_invariant_activations"),
    (huggingface, "why_not_fused"),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize(("place", "name"), STAGES, ids=[name for _, name in STAGES])
@pytest.mark.parametrize("after", [False, True], ids=["before", "behind"])
def test_a_failure_restores_the_model(
    place: Any, name: str, error: type[BaseException], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.own("llama").train()
    model.model.layers[0].eval()
    before, values = describe(model), {name: value.clone() for name, value in model.state_dict().items()}
    real = getattr(place, name)

    def fail(*given: Any, **named: Any) -> None:
        if after:
            real(*given, **named)
        raise error("no")

    monkeypatch.setattr(place, name, fail)
    with pytest.raises(error):
        HuggingFaceTarget(model, max_rows=1, max_length=32, fused_forward=True)
    assert describe(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_an_interruption_between_two_layers_restores_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.own("llama")
    before, done = describe(model), []
    real = huggingface.store_by_input

    def interrupted(given: Any) -> None:
        real(given.model.layers[0])
        done.append(describe(model) != before)
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "store_by_input", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HuggingFaceTarget(model, max_rows=1, max_length=32)
    assert done == [True] and describe(model) == before


def test_a_second_target_that_fails_leaves_the_model_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target = models.target("llama")
    before = describe(target.model)
    monkeypatch.setattr(load_checks, "check_logits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        HuggingFaceTarget(target.model, max_rows=1, max_length=32)
    assert describe(target.model) == before


def test_parts_with_configurations_of_their_own_are_restored() -> None:
    """Text and vision towers have one each."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                              image_size=28, patch_size=14, projection_dim=32)  # fmt: skip
    text = models.own("llama").config
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=90))
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    parts = [model.config, model.config.text_config, model.config.vision_config]
    before = [part._attn_implementation for part in parts]
    with pytest.raises(RuntimeError), unchanged_on_error(model):
        model.set_attn_implementation("specdec_paged")
        raise RuntimeError
    assert [part._attn_implementation for part in parts] == before and "eager" in before


def test_the_layout_of_weights_returns_and_values_that_changed_stay() -> None:
    model = torch.nn.Linear(3, 5)
    state = ModelState(model)
    model.weight.data = model.weight.data.t().contiguous().t()
    model.weight.data[0] = 7
    state.restore()
    assert model.weight.stride() == (3, 1) and model.weight[0].tolist() == [7, 7, 7]


class Packing(torch.nn.Linear):
    """A quantized layer that stores its weight in another form when it first runs, as those of bitsandbytes do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 2 and self.weight.shape[1] == 1:
            self.weight.data = self.weight.data.view(self.out_features, self.in_features)
        return torch.nn.functional.linear(input, self.weight, self.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_weight_that_packs_itself_keeps_its_form(dtype: torch.dtype) -> None:
    layer = Packing(8, 4)
    layer.weight = torch.nn.Parameter(layer.weight.data.reshape(-1, 1).to(dtype), requires_grad=False)
    model = torch.nn.Sequential(layer)
    state = ModelState(model)
    layer.weight.data = layer.weight.data.view(4, 8)
    values = layer.weight.data.clone()
    state.restore()
    assert torch.equal(layer.weight.data, values) and layer.weight.is_contiguous() and type(layer) is Packing


@pytest.mark.parametrize("inside", ["made", "opened", "closed"])
def test_weights_stay_of_the_kind_that_inference_mode_gave_them(inside: str) -> None:
    with torch.inference_mode(inside == "made"):
        model = tiny_model("llama")
    with torch.inference_mode(inside == "opened"):
        target = HuggingFaceTarget(model, max_length=64, fused_forward=None)
    assert target.why_not_fused is None
    with torch.inference_mode(inside == "closed"):
        target.close()
    assert {weight.is_inference() for weight in model.parameters()} == {inside == "made"}
    ids = torch.tensor([[1, 2, 3]])
    if inside == "made":
        assert all(weight.view_as(weight) is not None for weight in model.parameters())
    else:
        model(input_ids=ids, labels=ids).loss.backward()
