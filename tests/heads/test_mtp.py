"""The module of multi-token prediction against its formula and transformers' own; targets that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast import HuggingFaceTarget
from specdec_fast.heads.mtp import MtpHead, build_mtp_head
from specdec_fast.targets.tiny_models import tiny_model


def random(head: MtpHead, seed: int = 0) -> MtpHead:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=source))
    head.config._attn_implementation = "eager"
    return head.eval()


def causal(count: int) -> torch.Tensor:
    return torch.full((count, count), float("-inf")).triu(1)[None, None]


@pytest.mark.parametrize("hidden_first", [False, True])
@torch.no_grad()
def test_inputs_and_outputs_of_the_layer(hidden_first: bool) -> None:
    """Norms and projection are written out; the layer itself is transformers'."""
    head = random(build_mtp_head(models.target("llama", max_rows=1), hidden_first=hidden_first))
    embedded, features, place = torch.randn(1, 5, 64), 3 * torch.randn(1, 5, 64), torch.arange(5)[None]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + head.config.rms_norm_eps).rsqrt() * weight

    e, h = norm(embedded, head.enorm.weight), norm(features, head.hnorm.weight)
    joined = torch.cat([h, e] if hidden_first else [e, h], -1) @ head.eh_proj.weight.T
    turned = head.rotary_emb(joined, place)
    inner = head.layer(joined, position_embeddings=turned, position_ids=place, attention_mask=causal(5))
    want = norm(inner, head.norm.weight)
    torch.testing.assert_close(head(embedded, features, place, attention_mask=causal(5)), want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_it_equals_transformers_own_module() -> None:
    """GLM-4.5 with its experts: a chain of three tokens, by applying the module repeatedly."""
    from transformers import modeling_layers as layers

    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no module of its own to compare with")
    model = models.glm()
    theirs = layers.MtpModel(model, 1).eval()
    theirs.config._attn_implementation = "eager"
    for parameter in theirs.layers.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
    target = HuggingFaceTarget(model, max_rows=1, max_length=64)
    head = build_mtp_head(target)
    renamed = {"mtp_block.": "layer.", "post_norm.": "norm."}
    tensors = {}
    for key, value in theirs.layers[0].state_dict().items():
        for before, after in renamed.items():
            key = after + key[len(before) :] if key.startswith(before) else key
        tensors[key] = value
    head.load_state_dict(tensors)
    head.config._attn_implementation = "eager"
    head.eval()
    tokens, features = torch.randint(1, 96, (1, 7)), torch.randn(1, 7, 64)
    place = torch.arange(7)[None]
    want = theirs.forward_layer(0, features, place, None, input_ids=tokens)
    got = head(target.embed(tokens), features, place, attention_mask=causal(7))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert torch.equal(head.read(got, target.lm_head).argmax(-1), model.lm_head(want).argmax(-1))


def described(kind: str, **settings: Any) -> Any:
    """Returns the message of the checks before a module is built."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **settings)
    return SimpleNamespace(model=SimpleNamespace(config=config, base_model=None), layers=[None])


def test_latent_attention_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"latent attention .deepseek_v3, kv_lora_rank 512.*expected keys and values"):
        build_mtp_head(described("deepseek_v3"))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("mamba", r"recurrent layers .mamba: linear_attention.*expected layer_types that name a layer of attention"),
        ("falcon_h1", r"recurrent layers .falcon_h1: hybrid"),
        ("bamba", "model_type 'bamba', whose configuration computes its layer_types; expected one that stores them"),
        ("nemotron_h", "model_type 'nemotron_h'; expected decoder layers with an RMS norm"),
    ],
)
def test_hybrids_without_a_layer_of_attention_that_can_be_built_are_refused(family: str, words: str) -> None:
    target = HuggingFaceTarget(tiny_model(family), max_rows=1)
    with pytest.raises(ValueError, match=words):
        build_mtp_head(target)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next_experts", "qwen3_5", "qwen3_5_experts"])
def test_a_module_of_a_hybrid_is_its_layer_of_attention(family: str) -> None:
    """It takes the weights of the target's own layer, with its experts if it has any."""
    target = HuggingFaceTarget(tiny_model(family), max_rows=1)
    head = build_mtp_head(target)
    kinds = target.model.config.layer_types
    layer = target.layers[max(at for at, kind in enumerate(kinds) if kind == "full_attention")]
    assert head.config.layer_types == ["full_attention"] and head.norm.eps == layer.input_layernorm.eps
    head.layer.load_state_dict(layer.state_dict())
    assert hasattr(head.layer.mlp, "experts") == ("experts" in family)


def test_other_layers_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="model_type 'gpt2'; expected decoder layers with an RMS norm"):
        build_mtp_head(models.target("gpt2", max_rows=1))


def test_a_module_among_several_kinds_of_layers_takes_the_usual_one() -> None:
    """Full attention if the target alternates it with windows; experts if only the first layers have none."""
    head = build_mtp_head(models.target("gemma2", max_rows=1))
    assert head.config.layer_types == ["full_attention"] and head.config.num_hidden_layers == 1
    target = HuggingFaceTarget(models.glm(), max_rows=1, max_length=64)
    layer: Any = build_mtp_head(target).layer
    assert hasattr(layer.mlp, "experts") and not hasattr(target.layers[0].mlp, "experts")
