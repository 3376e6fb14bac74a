"""Passes that skip sub-blocks: outputs count as zero on every architecture, and the model is unchanged afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import hybrid_models, models

from specdec_fast import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.tiny_models import tiny_model

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


MIXING = ("self_attn", "linear_attn", "mamba", "conv", "mixer")
"""Names of modules with attention or a recurrence in layers of hybrid models."""
BARE = ("mamba", "falcon_mamba", "mamba2")
"""Models whose layers have no MLP."""


@pytest.mark.parametrize(
    "family", [each for each in hybrid_models.NAMES if each not in ("zamba", "zamba2", "nemotron_h")]
)
def test_a_skipped_mixer_adds_nothing(family: str) -> None:
    """Each layer alone, without its mixer and without its MLP."""
    target, text = HuggingFaceTarget(hybrid_models.model(family), max_rows=1), models.prompt(20, 90)
    whole = logits(target, text)
    for index in range(target.num_layers):
        for kind in ("attention", "mlp"):
            if kind == "mlp" and family in BARE:
                continue
            with target.skip_layers(SkippedLayers(**{kind: (index,)})):
                without = logits(target, text)
            model = copy.deepcopy(tiny_model(family))
            layer: Any = model.base_model.layers[index]
            for name, child in layer.named_children():
                is_mlp = name not in MIXING and any(each.dim() > 1 for each in child.parameters())
                if is_mlp if kind == "mlp" else name in MIXING:
                    child.register_forward_hook(_zeros)
            with torch.inference_mode():
                want = model(torch.tensor([text]), use_cache=False).logits[0]
            assert torch.allclose(without, want, atol=5e-4) and not torch.allclose(without, whole, atol=1e-3)
    assert torch.equal(logits(target, text), whole), "the model is whole again"
    target.close()


def _zeros(_module: Any, _args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def test_layers_of_one_kind_have_no_other_sub_block() -> None:
    """Skipping the MLP of a layer of Mamba changes nothing, and neither does skipping the mixer of an MLP."""
    for family, skip in (("mamba", SkippedLayers(mlp=(0, 1))), ("nemotron_h", SkippedLayers((_mlp_layer(),), ()))):
        target, text = HuggingFaceTarget(hybrid_models.model(family), max_rows=1), models.prompt(20, 90)
        whole = logits(target, text)
        with target.skip_layers(skip):
            assert torch.equal(logits(target, text), whole)
        target.close()


def _mlp_layer() -> int:
    kinds = hybrid_models.model("nemotron_h").config.layers_block_type
    return next(at for at, kind in enumerate(kinds) if kind in ("mlp", "moe"))


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_attention_and_mamba_of_a_layer_are_skipped_together(family: str) -> None:
    target, text = HuggingFaceTarget(hybrid_models.model(family), max_rows=1), models.prompt(20, 90)
    whole = logits(target, text)
    with target.skip_layers(SkippedLayers((1,), ())):
        without = logits(target, text)
    with target.skip_layers(SkippedLayers((1,), (1,))):
        neither = logits(target, text)
    model: Any = tiny_model(family)
    for name, module in model.base_model.layers[1].named_modules():
        if name.rpartition(".")[2] in ("self_attn", "mamba"):
            module.register_forward_hook(_zeros)
    with torch.inference_mode():
        want = model(torch.tensor([text]), use_cache=False).logits[0]
    assert torch.allclose(without, want, atol=5e-4) and not torch.allclose(without, whole, atol=0.01)
    assert not torch.allclose(neither, whole, atol=0.01) and torch.equal(logits(target, text), whole)
    target.close()


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
