"""Tiny models: logits without near-ties, and texts that depend on the context."""

from __future__ import annotations

import pytest
import torch
from oracles import models

from specdec_fast.targets.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", models.FAMILY_NAMES)
def test_logits_have_a_standard_deviation_near_three(family: str) -> None:
    ids = torch.randint(0, 96, (4, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = models.untouched(family)(ids, use_cache=False).logits
    assert 2.6 < float(logits.std()) < 3.4
    assert 2.2 < float(logits.std(dim=2).mean()) < 3.6, "the spread must be between tokens, not between contexts"


@pytest.mark.parametrize("family", models.FAMILY_NAMES)
def test_a_change_far_back_changes_the_next_token(family: str) -> None:
    """Most arg-maxima change with a token twenty positions back (inside the windows)."""
    ids = torch.randint(0, 96, (24, 40), generator=torch.Generator().manual_seed(2))
    other = ids.clone()
    other[:, 10:25] = torch.randint(0, 96, (24, 15), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        one = models.untouched(family)(ids, use_cache=False).logits[:, -1]
        two = models.untouched(family)(other, use_cache=False).logits[:, -1]
    assert float((one - two).abs().mean()) > 0.5
    assert int((one.argmax(1) != two.argmax(1)).sum()) >= 6


def test_the_same_seed_gives_the_same_model_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    one = tiny_model("llama", seed=3)
    random = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(random, torch.rand(3))
    two, other = tiny_model("llama", seed=3), tiny_model("llama", seed=4)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)
        assert not torch.allclose(one(ids).logits, other(ids).logits)


def test_shapes_and_types_can_be_changed() -> None:
    model = tiny_model("qwen3", vocab_size=32, num_hidden_layers=1, dtype=torch.bfloat16)
    assert model.config.vocab_size == 32 and model.dtype == torch.bfloat16 and len(model.model.layers) == 1
    assert tiny_model("gpt2", hidden_size=32, num_attention_heads=2).config.n_embd == 32


def test_unknown_families_are_listed() -> None:
    with pytest.raises(ValueError, match="tiny model family: got 'nothing'; expected one of") as error:
        tiny_model("nothing")
    assert all(family in str(error.value) for family in FAMILIES)
