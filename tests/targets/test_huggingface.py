"""HuggingFaceTarget: the packed forward gives transformers' logits for every row and branch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import models
from oracles.ledger import random_path, random_tree

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.draft import Draft
from specdec_fast.targets import attention
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_fast.targets.model_support import UnsupportedModelError
from specdec_kernels import tree_plan


def prefill(target: HuggingFaceTarget, texts: dict[int, list[int]]) -> torch.Tensor:
    """Extends empty rows by their texts in one pass, and returns the logits after each."""
    offsets = [0]
    for text in texts.values():
        offsets.append(offsets[-1] + len(text))
    output = target.extend(
        torch.tensor(list(texts), dtype=torch.int32),
        torch.tensor([token for text in texts.values() for token in text]),
        torch.tensor(offsets, dtype=torch.int32),
        logits=True,
    )
    assert output.logits is not None
    return output.logits


def logits_of(family: str, text: list[int]) -> torch.Tensor:
    """Returns the untouched model's logits after every token of a text."""
    with torch.no_grad():
        logits: torch.Tensor = models.untouched(family)(torch.tensor([text]), use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize(("family", "whole"), [*((name, False) for name in models.FAMILY_NAMES), ("llama", None)])
def test_trees_on_ragged_rows_have_the_logits_of_their_own_paths(
    family: str, whole: bool | None, page_size: int
) -> None:
    source = random.Random(page_size)
    target = models.target(family, page_size=page_size, num_pages=700, fused_forward=whole)
    texts = {3: models.prompt(40), 0: models.prompt(1), 5: models.prompt(75), 2: models.prompt(5)}
    held = dict(texts)
    for row, text in texts.items():
        assert target.cache.reserve(row, len(text) + 40)
    after = prefill(target, texts)
    for at, text in enumerate(texts.values()):
        assert torch.allclose(after[at], logits_of(family, text)[-1], atol=2e-4)
    for turn in range(3):
        rows = source.sample(list(held), 3)
        trees = []
        for _ in rows:
            parents = random_tree(source, source.randrange(1, 12))
            trees.append(([source.randrange(96) for _ in parents], parents))
        draft = Draft.trees(rows, trees)
        plan = tree_plan(draft.parents, draft.offsets)
        output, slots = target.score(draft, plan)
        assert output.logits is not None and output.logits.shape == (draft.num_nodes, 96)
        node, paths = 0, []
        for row, (tokens, parents) in zip(rows, trees, strict=True):
            for place in range(len(tokens)):
                path, at = [], place
                while at >= 0:
                    path.append(tokens[at])
                    at = parents[at]
                if place in (0, len(tokens) - 1, len(tokens) // 2):
                    want = logits_of(family, [*held[row], *reversed(path)])[-1]
                    assert torch.allclose(output.logits[node], want, atol=2e-4), (turn, row, place)
                node += 1
            paths.append(random_path(source, parents))
        width = max(map(len, paths))
        offsets = draft.offsets.tolist()
        packed = torch.full((len(rows), width), -1, dtype=torch.int32)
        for at, path in enumerate(paths):
            packed[at, : len(path)] = torch.tensor([offsets[at] + node for node in path])
            held[rows[at]] = [*held[rows[at]], *(trees[at][0][node] for node in path)]
        target.cache.commit(
            draft.rows, slots, packed, torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
        )


def test_only_the_logits_that_are_needed_are_computed() -> None:
    target = models.target("llama")
    seen: list[int] = []
    target.model.get_output_embeddings().register_forward_pre_hook(lambda _module, args: seen.append(args[0].shape[1]))
    for row in range(3):
        assert target.cache.reserve(row, 100)
    texts = {0: models.prompt(40), 1: models.prompt(17), 2: models.prompt(5)}
    assert prefill(target, texts).shape == (3, 96)
    output = target.extend(
        torch.tensor([1], dtype=torch.int32),
        torch.tensor(models.prompt(17)),
        torch.tensor([0, 17], dtype=torch.int32),
        logits=False,
    )
    draft = Draft.chains([0, 2], [[1, 2, 3], [4]])
    target.score(draft, tree_plan(draft.parents, draft.offsets))
    assert output.logits is None and seen == [3, 1, 4]


def test_a_padded_vocabulary_is_cut() -> None:
    target = HuggingFaceTarget(models.own("llama"), max_length=64, vocab_size=90)
    assert target.cache.reserve(0, 10)
    logits = prefill(target, {0: [1, 2, 3]})
    assert target.vocab_size == 90 and logits.shape == (1, 90)
    assert target.lm_head(torch.zeros(2, 64)).shape == (2, 90)
    assert HuggingFaceTarget(models.own("llama"), max_length=64, vocab_size=1000).vocab_size == 96


def test_it_can_be_called_outside_inference_mode() -> None:
    target = models.target("llama")
    assert target.cache.reserve(0, 40)
    logits = prefill(target, {0: models.prompt(17)})
    assert not logits.requires_grad and not target.cache.keys[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_transformers(dtype: torch.dtype) -> None:
    """Errors are at most a few times those of transformers in the same dtype, against float32."""
    text = models.prompt(130)
    for family in ("llama", "gemma2"):
        target = HuggingFaceTarget(models.own(family, dtype), max_length=200)
        assert target.cache.reserve(0, 200)
        draft = Draft.chains([0], [text])
        ours = target.score(draft, tree_plan(draft.parents, draft.offsets))[0].logits
        assert ours is not None and ours.dtype == dtype
        theirs_model = models.own(family, dtype)
        with torch.no_grad():
            theirs = theirs_model(torch.tensor([text]), use_cache=False).logits[0].float()
        exact = logits_of(family, text)
        own_error, their_error = (ours.float() - exact).abs(), (theirs - exact).abs()
        assert float(own_error.mean()) < 1.5 * float(their_error.mean()) + 1e-3
        assert float(own_error.max()) < 2.0 * float(their_error.max()) + 1e-2


def test_half_precision_text_diverges_only_at_near_ties() -> None:
    """bfloat16 against transformers' bfloat16: a first difference occurs only where two logits are nearly equal."""
    from specdec_fast import Engine, SamplingParams, get_drafter

    reference = models.own("llama", torch.bfloat16)
    reference.generation_config.eos_token_id = None
    prompts = [models.prompt(length) for length in (5, 17, 40)]
    small = HuggingFaceTarget(models.kin("llama").to(torch.bfloat16), max_length=128)
    target = HuggingFaceTarget(models.own("llama", torch.bfloat16), max_length=128)
    engine = Engine(target, get_drafter("draft_model")(small, num_draft_tokens=4))
    handles = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=32))
    for prompt, handle in zip(prompts, handles, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            want = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, pad_token_id=0
            )[0, len(prompt) :].tolist()
            at = next((at for at, (a, b) in enumerate(zip(handle.tokens, want, strict=False)) if a != b), None)
            if at is not None:
                best = reference(torch.tensor([[*prompt, *want[:at]]])).logits[0, -1].float().topk(2).values
                gap = float(best[0] - best[1])
                print(f"first divergence at token {at}, top-2 gap {gap:.3g}")
                assert gap < 0.15, f"token {at} differs though the best logit leads by {gap}"
    assert engine.stats.alpha > 0.3


def tiny_config(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **changes)


def test_a_fixed_rotary_scaling_is_served() -> None:
    from transformers import AutoModelForCausalLM

    from specdec_fast.targets.tiny_models import SHAPE

    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(tiny_config("llama", **SHAPE, rope_parameters=rope))
    target = HuggingFaceTarget(model, max_length=64)
    assert target.cache.reserve(0, 20)
    text = models.prompt(17)
    got = prefill(target, {0: text})
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.allclose(got[0], model(torch.tensor([text])).logits[0, -1], atol=1e-4)


def test_encoder_decoders_are_refused() -> None:
    from transformers import T5ForConditionalGeneration

    shape = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(UnsupportedModelError, match="got an encoder-decoder; expected a decoder-only"):
        HuggingFaceTarget(T5ForConditionalGeneration(tiny_config("t5", **shape)))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (
            "recurrent_gemma",
            {
                "vocab_size": 32,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "lru_width": 16,
            },
        ),
        ("bloom", {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
    ],
)
def test_models_that_cannot_be_served_are_refused(kind: str, shape: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(kind, **shape))
    with pytest.raises(UnsupportedModelError, match="expected"):
        HuggingFaceTarget(model, max_length=64)


def test_calling_the_model_directly_raises_with_a_remedy() -> None:
    target = models.target("llama")
    words = r"called outside its target; use its engine, or close that with engine\.close\(\)"
    with pytest.raises(RuntimeError, match=words):
        target.model(torch.tensor([[1, 2, 3]]))
    target.model.set_attn_implementation("sdpa")
    assert target.model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 96)


def test_an_engine_continues_after_a_direct_call_of_its_model() -> None:
    engine = Engine(models.target("llama"))
    params = SamplingParams(temperature=0, max_new_tokens=12)
    want = engine.generate([[1, 2, 3]], params)[0].tokens
    engine.target.model.set_attn_implementation("sdpa")
    found = engine.target.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False)
    assert found[0, 3:].tolist() == want == engine.generate([[1, 2, 3]], params)[0].tokens


def test_detecting_the_attention_that_a_model_calls() -> None:
    target = models.target("llama")
    model = target.model
    assert attention.is_served(model.config)
    model.set_attn_implementation("eager")
    assert not attention.is_served(model.config)
    for name in ("eager", attention.NAME):  # some configurations store it under another name
        assert attention.is_served(SimpleNamespace(_attn_implementation=name)) == (name == attention.NAME)


def test_capacities() -> None:
    target = models.target("llama", max_length=100_000, max_rows=2, page_size=16)
    assert target.max_length == target.context_limit == 512
    assert target.cache.pages.num_pages == 2 * 32 + 1
    assert target.embed(torch.tensor([1, 2])).shape == (2, 64)
    for name, value in (("max_length", 0), ("max_length", -4), ("max_rows", 0)):
        with pytest.raises(ValueError, match=f"{name}: got {value}; expected at least 1"):
            models.target("llama", **{name: value})
