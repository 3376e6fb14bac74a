"""Dynamic programming over hidden states: exact in known cases, and close to the best of all subsets in others."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from oracles import models
from torch.nn.functional import cosine_similarity

from specdec_fast import HuggingFaceTarget
from specdec_fast.targets.skipped_layers import SkippedLayers
from specdec_fast.targets.tiny_models import tiny_model
from specdec_fast.tune.skipped_layers_by_similarity import similar_choices

LAYERS = 3
TEXTS = [models.prompt(9), models.prompt(1), models.prompt(17)]


def target(model: Any = None) -> HuggingFaceTarget:
    own = tiny_model("llama", num_hidden_layers=LAYERS) if model is None else copy.deepcopy(model)
    return HuggingFaceTarget(own, max_length=64, max_rows=3)


def bounds(count: int) -> torch.Tensor:
    return torch.tensor([0, count], dtype=torch.int32)


@torch.inference_mode()
def closeness(over: HuggingFaceTarget, skip: SkippedLayers) -> float:
    """Mean cosine of the last token's hidden state, before the final norm, with and without: prefixes are exact."""
    found = []
    for text in TEXTS:
        states = []
        for left_out in (SkippedLayers(), skip):
            over.cache.release([0])
            over.cache.reserve(0, len(text))
            rows, caught = torch.tensor([0], dtype=torch.int32), []
            if len(text) > 1:
                over.extend(
                    rows, torch.tensor(text[:-1]), torch.tensor([0, len(text) - 1], dtype=torch.int32), logits=False
                )
            hook = over.model.model.norm.register_forward_pre_hook(
                lambda _, args, caught=caught: caught.append(args[0])
            )
            with over.skip_layers(left_out):
                over.extend(rows, torch.tensor(text[-1:]), torch.tensor([0, 1], dtype=torch.int32), logits=True)
            hook.remove()
            states.append(caught[0][0, 0])
        found.append(float(cosine_similarity(states[0], states[1], dim=0)))
    over.cache.release([0])
    return sum(found) / len(found)


def test_similarities_are_those_of_real_passes_and_no_worse_than_most_subsets() -> None:
    over = target()
    choices = similar_choices(over, TEXTS)
    assert [len(choice.skip) for choice in choices] == list(range(2 * LAYERS + 1))
    assert choices[0].similarity == pytest.approx(1, abs=1e-6)
    every: dict[int, list[float]] = {}
    for bits in product((0, 1), repeat=2 * LAYERS):
        every.setdefault(sum(bits), []).append(closeness(over, SkippedLayers.of_bits(bits)))
    for count, choice in enumerate(choices):
        assert choice.similarity == pytest.approx(closeness(over, choice.skip), abs=1e-5)
        better = sum(other > choice.similarity + 1e-6 for other in every[count])
        assert better <= 0.25 * len(every[count]), f"{better} of {len(every[count])} subsets are better"
    assert choices[1].similarity == pytest.approx(max(every[1]), abs=1e-5), "with one left out nothing is pruned"
    assert over.cache.pages.num_used == 0


def test_sub_blocks_that_add_nothing_are_left_out_first() -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    choices = similar_choices(target(model), TEXTS)
    assert choices[2].skip == SkippedLayers((1,), (2,)) and choices[2].similarity == pytest.approx(1, abs=1e-6)


def test_models_whose_mlp_cannot_be_skipped_alone() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2,
                       max_position_embeddings=64, word_embed_proj_dim=32)  # fmt: skip
    choices = similar_choices(target(OPTForCausalLM(config)), TEXTS)
    assert [choice.skip for choice in choices][-1] == SkippedLayers((0, 1), (0, 1))
    assert all(set(choice.mlp) <= set(choice.attention) for choice in choices)


def test_bad_texts() -> None:
    over = target()
    for texts in ([], [[1]] * 4, [[1], []]):
        with pytest.raises(ValueError, match=r"texts: got \d; expected 1\.\.3"):
            similar_choices(over, texts)
    with pytest.raises(ValueError, match="expected at most 64"):
        similar_choices(over, [[1] * 65])
    assert over.cache.pages.num_used == 0
