"""Many architectures of transformers: served exactly, or refused with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracles import models

from specdec_fast.core.draft import Draft
from specdec_fast.targets.attention import NAME, register, use_attention
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_fast.targets.tiny_models import SHAPE
from specdec_kernels import tree_plan

LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SERVED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "gpt_neox": {},
    "opt": {},
    "olmo2": {},
    "cohere2": {"sliding_window": 24, "logit_scale": 1.0},
    "granite": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 24},  # attention sinks
    "smollm3": {},  # layers without positions
    "deepseek_v3": LATENT,  # values narrower than keys
}


def random_model(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPE, **changes}
    if kind == "deepseek_v3":
        del shape["head_dim"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "sink" in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("kind", SERVED)
def test_trees_after_a_prefix_have_the_model_s_own_logits(kind: str) -> None:
    model = random_model(kind, **SERVED[kind])
    text = models.prompt(60)
    with torch.no_grad():
        want = model(torch.tensor([text]), use_cache=False).logits[0]
    target = HuggingFaceTarget(copy.deepcopy(model), max_length=100, max_rows=2)
    assert target.cache.reserve(1, 80)
    target.extend(
        torch.tensor([1], dtype=torch.int32),
        torch.tensor(text[:35]),
        torch.tensor([0, 35], dtype=torch.int32),
        logits=False,
    )
    chain = list(range(-1, 24))
    draft = Draft.trees([1], [([*text[35:], 5, 6], [*chain, 3, 25])])
    got = target.score(draft, tree_plan(draft.parents, draft.offsets))[0].logits
    assert got is not None
    spread = float(want.std())
    assert torch.allclose(got[:25], want[35:], atol=1e-4 * max(spread, 0.1), rtol=1e-4)
    with torch.no_grad():
        branch = model(torch.tensor([[*text[:39], 5, 6]]), use_cache=False).logits[0, -1]
    assert torch.allclose(got[26], branch, atol=1e-4 * max(spread, 0.1), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("diffllama", {}, r"attention calls from layers \[0, 0, 1, 1\]"),
        ("doge", {}, "layer 0 makes or changes its attention mask by itself"),
        ("roberta", {"is_decoder": True}, "differ from the model's own"),  # positions begin behind the padding token's
        ("nemotron", {}, "does not pass keyword arguments on"),
        (
            "llama",
            {"layer_types": ["linear_attention", "full_attention"]},
            r"linear_attention; expected .* \(packed passes compute no other mask",
        ),
        ("recurrent_gemma", {}, r"got RecurrentGemmaRecurrentBlock at 'model.layers.0.*', which calls no function"),
        ("rwkv", {}, r"recurrent state in RwkvBlock at 'rwkv.blocks.0', but no mixer that is known"),
        ("bloom", {}, "attention interface"),
    ],
)
def test_unsupported_models_are_refused_and_unchanged(kind: str, changes: dict[str, Any], message: str) -> None:
    model = random_model(kind, **changes)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message) as error:
        HuggingFaceTarget(model, max_length=64)
    assert type(model).__name__ in str(error.value) and "expected" in str(error.value)
    assert model.config._attn_implementation == before
    assert model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.shape == (1, 3, 96)


def test_copied_layers_with_configurations_of_their_own_are_served_and_given_back() -> None:
    model = models.own("llama")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[2].self_attn.layer_idx, model.config.num_hidden_layers = 2, 3
    text = torch.tensor([models.prompt(9)])
    with torch.no_grad():
        want = model(text, use_cache=False).logits
    target = HuggingFaceTarget(model, max_length=64)
    assert target.num_layers == 3
    target.close()
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"sdpa"}
    with torch.no_grad():
        assert torch.equal(model(text, use_cache=False).logits, want)


def test_copied_layers_are_served_again_after_a_target_that_was_never_closed() -> None:
    model = models.own("llama")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[2].self_attn.layer_idx, model.config.num_hidden_layers = 2, 3
    register()
    use_attention(model, NAME)
    target = HuggingFaceTarget(model, max_length=64)
    target.close()
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"eager"}


def test_a_model_may_be_given_to_a_second_target() -> None:
    model = models.own("llama")
    for _ in range(2):
        target = HuggingFaceTarget(model, max_length=64)
        assert target.cache.reserve(0, 8)
        draft = Draft.chains([0], [[1, 2, 3]])
        got = target.score(draft, tree_plan(draft.parents, draft.offsets))[0].logits
        with torch.no_grad():
            want = models.untouched("llama")(torch.tensor([[1, 2, 3]])).logits[0]
        assert got is not None and torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(("pages", "page_size"), [(2, 1), (3, 1), (2, 16)])
def test_the_smallest_caches(pages: int, page_size: int) -> None:
    target = HuggingFaceTarget(models.own("gpt2"), max_length=64, num_pages=pages, page_size=page_size)
    assert target.cache.pages.num_used == 0 and target.cache.lengths.sum() == 0
