"""Passes that skip sub-blocks: outputs count as zero on every architecture, and the model is unchanged afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import SkippedLayers

ENDS = {"attention": ("self_attn.o_proj", "attn.c_proj"), "mlp": ("mlp.down_proj", "mlp.c_proj")}
SETS = [SkippedLayers((0,), ()), SkippedLayers((), (1,)), SkippedLayers((1,), (0, 1)), SkippedLayers((0, 1), (0, 1))]


def silenced(family: str, skip: SkippedLayers) -> Any:
    """Returns a copy of the tiny model in which these sub-blocks return zeros."""
    model = copy.deepcopy(models.untouched(family))
    for index, layer in enumerate(target_layers(model)):
        for kind, names in ENDS.items():
            if index in getattr(skip, kind):
                for name, module in layer.named_modules():
                    if name in names:
                        module.weight.data.zero_()
                        if getattr(module, "bias", None) is not None:
                            module.bias.data.zero_()
    return model


def target_layers(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


@torch.inference_mode()
def logits(target: HuggingFaceTarget, text: list[int]) -> torch.Tensor:
    target.cache.release([0])
    target.cache.reserve(0, len(text))
    rows, bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([0, len(text)], dtype=torch.int32)
    found = target.extend(rows, torch.tensor(text), bounds, logits=torch.arange(len(text))).logits
    assert found is not None
    return found


@pytest.mark.parametrize("skip", SETS, ids=str)
@pytest.mark.parametrize("family", models.FAMILY_NAMES)
def test_a_skipped_sub_block_adds_nothing(family: str, skip: SkippedLayers) -> None:
    target, text = models.target(family, max_rows=1), models.prompt(40)
    whole = logits(target, text)
    with target.skip_layers(skip):
        without = logits(target, text)
    with torch.inference_mode():
        want = silenced(family, skip)(torch.tensor([text]), use_cache=False).logits[0]
    assert torch.allclose(without, want, atol=2e-4) and not torch.allclose(without, whole, atol=0.1)
    assert torch.equal(logits(target, text), whole), "the model is whole again"
    assert not [name for name, module in target.model.named_modules() if "forward" in module.__dict__]


def test_a_replaced_forward_of_a_module_is_restored() -> None:
    target, text = models.target("llama", max_rows=1), models.prompt(8)
    layers = target.model.model.layers

    def steered(hidden: Any) -> Any:
        return type(layers[0].mlp).forward(layers[0].mlp, hidden) + 1

    layers[0].mlp.forward = steered
    try:
        want = logits(target, text)
        with target.skip_layers(SkippedLayers(mlp=(0,))):
            assert layers[0].mlp.forward is not steered
        assert layers[0].mlp.forward is steered and torch.equal(logits(target, text), want)
    finally:
        del layers[0].mlp.forward


def test_a_layer_without_both_is_not_called_and_its_unused_norm_is_skipped() -> None:
    target = models.target("llama", max_rows=1)
    layers, called = target.model.model.layers, []
    with target.skip_layers(SkippedLayers()):
        pass  # the pass that checks the model has run
    for index, layer in enumerate(layers):
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            inner = layer.get_submodule(name)

            def note(_: Any, args: Any, output: Any, at: tuple[int, str] = (index, name)) -> None:
                busy = output is not (args[0] if args else None) and (at[1] != "self_attn" or bool(output[0].any()))
                called.append((*at, busy))

            inner.register_forward_hook(note)
    with target.skip_layers(SkippedLayers((0, 1), (0,))):
        logits(target, [1, 2, 3])
    assert called == [
        (1, "input_layernorm", False),
        (1, "self_attn", False),
        (1, "post_attention_layernorm", True),
        (1, "mlp", True),
    ]


def test_a_failed_pass_restores_the_model() -> None:
    target = models.target("gpt2", max_rows=1)
    whole = logits(target, [1, 2, 3])
    with pytest.raises(RuntimeError, match="no more"):
        with target.skip_layers(SkippedLayers((1,), (1,))):
            raise RuntimeError("no more")
    assert torch.equal(logits(target, [1, 2, 3]), whole)


def test_missing_layers_and_sub_blocks_that_are_not_modules() -> None:
    with pytest.raises(ValueError, match=r"layers to skip: got mlp of layer 2; expected 0\.\.1"):
        with models.target("llama", max_rows=1).skip_layers(SkippedLayers((), (2,))):
            pass
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2,
                       max_position_embeddings=64, word_embed_proj_dim=32)  # fmt: skip
    target = HuggingFaceTarget(OPTForCausalLM(config), max_rows=1)
    with target.skip_layers(SkippedLayers((1,), ())):
        logits(target, [1, 2, 3])
    with pytest.raises(ValueError, match="the MLP of layer 1 is not a separate module and cannot be skipped alone"):
        with target.skip_layers(SkippedLayers((), (1,))):
            pass
    with target.skip_layers(SkippedLayers((1,), (1,))):
        logits(target, [1, 2, 3])
