"""A hybrid model begins with what its Llama knows: exactly where layers are of one kind, nearly where they are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from specdec_fast.train.demo_pair.hybrid_conversion import convert, measure_attention
from specdec_fast.train.demo_pair.hybrid_stage import attention_calls, mixer_loss, mixers_of
from specdec_fast.train.demo_pair.model_shapes import ATTENTION_EVERY, TARGET, Shape, build, build_hybrid

SHAPE = Shape(layers=4, hidden=32, heads=4, kv_heads=2, inner=48, vocabulary=300, context=128, head_dim=16)
IDS = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def models():
    llama, hybrid = build(SHAPE, 3).eval(), build_hybrid(SHAPE, 4).eval()
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 2:
                parameter.mul_(5.0)
    return llama, hybrid


def test_every_fourth_layer_keeps_its_attention():
    hybrid = build_hybrid(SHAPE, 0)
    kinds = [hasattr(mixer, "q_proj") for mixer in mixers_of(hybrid)]
    assert kinds == [False, False, False, True] and ATTENTION_EVERY == 4


def test_the_bundled_shape_has_less_than_14_megabytes():
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_hybrid(TARGET, 0).parameters())
    assert count > 6.5e6 and 2 * count < 14e6


def test_embeddings_mlps_and_norms_are_those_of_the_llama(models):
    llama, hybrid = models
    convert(llama, hybrid, IDS)
    hidden = torch.randn(2, 5, SHAPE.hidden)
    assert torch.equal(llama.model.embed_tokens.weight, hybrid.model.embed_tokens.weight)
    assert hybrid.lm_head.weight is hybrid.model.embed_tokens.weight
    torch.testing.assert_close(hybrid.model.norm(hidden), llama.model.norm(hidden))
    for old, new in zip(llama.model.layers, hybrid.model.layers, strict=True):
        assert torch.equal(new.mlp(hidden), old.mlp(hidden))
        torch.testing.assert_close(new.input_layernorm(hidden), old.input_layernorm(hidden))
        torch.testing.assert_close(new.post_attention_layernorm(hidden), old.post_attention_layernorm(hidden))


def test_kept_attention_without_its_new_norms_is_that_of_the_llama(models):
    llama, hybrid = models
    hybrid.set_attn_implementation("eager")
    convert(llama, hybrid, IDS)
    mixer, call = mixers_of(hybrid)[3], attention_calls(llama, IDS)[3]
    sizes = measure_attention(llama, IDS).size
    torch.testing.assert_close(1 + mixer.q_norm.weight, torch.full((16,), sizes[3, "q"]))
    torch.testing.assert_close(1 + mixer.k_norm.weight, torch.full((16,), sizes[3, "k"]))
    mixer.q_norm = mixer.k_norm = torch.nn.Identity()
    assert mixer_loss(mixer, *call).item() < 1e-9
    mixer.o_proj.weight.data /= 2.0
    assert mixer_loss(mixer, *call).item() == pytest.approx(0.25)


def test_a_delta_rule_begins_like_attention_where_there_is_nothing_to_choose(models):
    """With one token, and queries equal to keys, attention returns its value; so does a delta rule, if not its size."""
    llama, hybrid = models
    for layer in llama.model.layers:
        keys = layer.self_attn.k_proj.weight.view(2, 16, 32)
        layer.self_attn.q_proj.weight.data.copy_(keys.repeat_interleave(2, 0).reshape(64, 32))
    one = IDS[:1, :1]
    convert(llama, hybrid, one)
    for mixer, (inputs, _, wanted) in zip(mixers_of(hybrid)[:3], attention_calls(llama, one)[:3], strict=True):
        found = mixer(hidden_states=inputs)
        assert functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.9


def test_a_mixer_loss_is_a_share_of_the_attention_s_size(models):
    llama, hybrid = models
    convert(llama, hybrid, IDS)
    mixer, (inputs, positions, wanted) = mixers_of(hybrid)[0], attention_calls(llama, IDS)[0]
    mixer.out_proj.weight.data.zero_()
    assert mixer_loss(mixer, inputs, positions, wanted).item() == pytest.approx(1.0)
