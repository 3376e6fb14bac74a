"""The target's projection for heads gives the target's logits, however the model scales or caps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import models
from oracles.tiny_architectures import tiny_architecture

from specdec_fast import SamplingParams, load
from specdec_fast.core.draft import Draft
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.draft_runners.parallel_heads import ParallelHeadsDrafter
from specdec_fast.heads.eagle import EagleHead
from specdec_fast.heads.medusa import MedusaHeads
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.output_scaling import OutputScaling, find_output_scaling
from specdec_fast.trees.static_shape import shape_of_widths

HALF = (torch.bfloat16, torch.float16)
SCALED: dict[str, tuple[dict[str, Any], OutputScaling]] = {
    "llama": ({}, OutputScaling()),
    "cohere": ({"logit_scale": 0.3}, OutputScaling(0.3)),
    "cohere2": ({"logit_scale": 0.25}, OutputScaling(0.25)),
    "granite": ({"logits_scaling": 8.0}, OutputScaling(1 / 8)),
    "granitemoe": ({"logits_scaling": 6.0}, OutputScaling(1 / 6)),
    "hyperclovax": ({"logits_scaling": 0.7}, OutputScaling(0.7)),  # the same name for the inverse
    "minicpm3": ({"dim_model_base": 16}, OutputScaling(16 / 64)),  # scales states, before the projection
    "gemma2": ({"final_logit_softcapping": 2.0}, OutputScaling(1.0, 2.0)),
    "nanochat": ({"final_logit_softcapping": 15.0}, OutputScaling(1.0, 15.0)),
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model = tiny_architecture(kind)
    config = model.config
    for name, value in SCALED[kind][0].items():
        setattr(config, name, value)
    weights = model.state_dict()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # reads the fields when it is built
    model.load_state_dict(weights)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("kind", SCALED)
def test_the_projection_for_heads_gives_the_target_s_logits(kind: str, dtype: torch.dtype) -> None:
    target = HuggingFaceTarget(build(kind, dtype), max_rows=1, max_length=64)
    target.cache.reserve(0, 12)
    draft = Draft.chains([0], [models.prompt(12)])
    output, _ = target.score(draft, draft.get_plan(), ("final_norm",))
    again = target.lm_head(output.aux_hidden_states["final_norm"])
    assert output.logits is not None and again.dtype == output.logits.dtype
    spread = float(output.logits.float().std())
    assert float((again - output.logits).detach().abs().max()) <= (1e-5 if dtype == torch.float32 else 0.05) * spread


@pytest.mark.parametrize("kind", SCALED)
def test_scales_and_caps_are_found(kind: str) -> None:
    model, text = build(kind), torch.tensor([models.prompt(12)])
    with torch.no_grad():
        hidden, logits = model.base_model(text)[0][0], model(text).logits[0]
    found, expected = find_output_scaling(model, hidden[-1:], logits[-1:]), SCALED[kind][1]
    assert found is not None and found.cap == expected.cap
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)


def test_a_value_that_the_configuration_names_is_used_exactly() -> None:
    model = build("granite").to(torch.bfloat16)
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = model.lm_head(hidden) / 8.0
    assert find_output_scaling(model, hidden, logits) == OutputScaling(1 / 8)


def test_a_scale_without_a_name_is_measured() -> None:
    model, hidden = models.own("llama"), torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    found = find_output_scaling(model, hidden, 3.21 * model.lm_head(hidden))
    assert found is not None and found.cap is None and found.scale == pytest.approx(3.21, rel=1e-5)


def test_a_scale_comes_before_a_cap() -> None:
    model, hidden = models.own("gemma2"), torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    model.config.final_logit_softcapping = 2.0
    with torch.no_grad():
        logits = 2.0 * torch.tanh(0.25 * model.lm_head(hidden) / 2.0)
        found = find_output_scaling(model, hidden, logits)
        assert found is not None and found.cap == 2.0 and found.scale == pytest.approx(0.25, rel=1e-4)
        torch.testing.assert_close(found(model.lm_head(hidden)), logits, rtol=1e-4, atol=1e-4)


def test_a_cap_of_attention_is_not_one_of_logits() -> None:
    model = models.own("gemma2")
    assert model.config.attn_logit_softcapping == 50.0
    model.config.final_logit_softcapping = None
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    assert find_output_scaling(model, hidden, model.lm_head(hidden)) == OutputScaling()


@pytest.mark.parametrize(
    "change", [lambda logits: logits**3, lambda logits: logits.roll(1, 1), lambda x: x * torch.nan]
)
def test_other_maps_are_not_found(change: Any) -> None:
    model, hidden = models.own("llama"), torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    assert find_output_scaling(model, hidden, change(model.lm_head(hidden))) is None
    assert find_output_scaling(model, hidden[:, :5], model.lm_head(hidden)) is None


def test_a_target_without_a_usable_projection_says_why() -> None:
    """BERT's decoders transform states between the last layer and the projection."""
    target = HuggingFaceTarget(tiny_architecture("bert"), max_rows=1, max_length=64)
    assert target.why_no_lm_head is not None and "projection of its own" in target.why_no_lm_head
    with pytest.raises(UnsupportedModelError, match="BertLMHeadModel: its logits are no scaled or capped outputs"):
        target.lm_head(torch.zeros(1, 64))
    assert models.target("llama").why_no_lm_head is None


def test_heads_that_need_the_target_s_projection_are_refused_when_they_are_made() -> None:
    target = HuggingFaceTarget(tiny_architecture("bert"), max_rows=1, max_length=64)
    shape = shape_of_widths([1, 1])
    for heads in (models.blockwise_heads(target), MedusaHeads(64, 96, 2, own_lm_head=False)):
        with pytest.raises(UnsupportedModelError, match="a head with a projection of its own"):
            ParallelHeadsDrafter(target, heads, shape)
    with pytest.raises(UnsupportedModelError, match="a head with a projection of its own"):
        PagedHead(EagleHead(models.own("llama").config), target)
    assert ParallelHeadsDrafter(target, MedusaHeads(64, 96, 2), shape).num_draft_tokens == 2
    assert PagedHead(EagleHead(models.own("llama").config, lm_head=torch.nn.Linear(64, 96)), target).vocab_size == 96
    assert ParallelHeadsDrafter(models.target("llama"), MedusaHeads(64, 96, 2, own_lm_head=False), shape)


def test_recycling_reads_prompts_only_where_the_projection_is_usable() -> None:
    for model, reads in ((tiny_architecture("bert"), False), (models.own("llama"), True)):
        engine = load(model, drafter="recycling", max_rows=1, max_length=64, eos_token_ids=())
        assert bool(engine.needs.prompt_aux_hidden_states) == reads
        got = engine.generate([models.prompt(17)], SamplingParams(temperature=0, max_new_tokens=8))[0]
        assert len(got.tokens) == 8 and not got.error and not got.stats.faults
