"""EAGLE heads against their formulas, from a checkpoint's tensors: order of inputs, norms, rotation, auxiliary
hidden states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models
from oracles.eagle_formulas import attended, mlp, norm
from torch import Tensor

from specdec_fast.heads.checkpoint_eagle import load_eagle, load_eagle3

COUNT = 6


@pytest.fixture(scope="module")
def target() -> Any:
    return models.target("llama", max_rows=1)


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns embeddings and features of different magnitude, so that swaps are detected, and positions from 3."""
    source = torch.Generator().manual_seed(seed)
    embedded, features = (torch.randn(COUNT, heads.HIDDEN, generator=source) for _ in range(2))
    return 0.3 * embedded, 2 * features, torch.arange(3, 3 + COUNT)


def run(head: Any, embedded: Tensor, features: Tensor, places: Tensor) -> Tensor:
    head.config._attn_implementation = "eager"
    mask = torch.full((COUNT, COUNT), float("-inf")).triu(1)[None, None]
    found: Tensor = head(embedded[None], features[None], places[None], attention_mask=mask)[0]
    return found


@torch.no_grad()
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_eagle_1_is_its_formula(tmp_path: Path, target: Any, theta: float) -> None:
    """fc of (embedding, feature), a layer without its first norm, no final norm, the target's projection."""
    tensors = heads.eagle_tensors()
    head = load_eagle(heads.write(tmp_path, {**heads.LAYER, "rope_theta": theta}, tensors), target)
    embedded, features, places = given()
    hidden = torch.cat([embedded, features], -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    hidden = hidden + attended(hidden, places, tensors, "layers.0.", theta)
    hidden = hidden + mlp(norm(hidden, tensors["layers.0.post_attention_layernorm.weight"]), tensors, "layers.0.")
    got = run(head, embedded, features, places)
    torch.testing.assert_close(got, hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.read(got, target.lm_head), target.lm_head(hidden), atol=1e-3, rtol=1e-3)
    assert torch.equal(head.fuse([features]), features)


@torch.no_grad()
def test_eagle_1_with_the_norms_of_speculators_is_its_formula(tmp_path: Path, target: Any) -> None:
    tensors = heads.eagle_tensors()
    for at, key in enumerate(("embedding_layernorm", "layers.0.input_layernorm", "pre_lm_head_layernorm")):
        tensors[f"{key}.weight"] = 0.5 + torch.rand(heads.HIDDEN, generator=torch.Generator().manual_seed(at))
    head = load_eagle(heads.write(tmp_path, dict(heads.LAYER), tensors), target)
    embedded, features, places = given()
    joined = torch.cat([norm(embedded, tensors["embedding_layernorm.weight"]), features], -1)
    hidden = joined @ tensors["fc.weight"].T + tensors["fc.bias"]
    fed = norm(hidden, tensors["layers.0.input_layernorm.weight"])
    hidden = hidden + attended(fed, places, tensors, "layers.0.", 10_000.0)
    hidden = hidden + mlp(norm(hidden, tensors["layers.0.post_attention_layernorm.weight"]), tensors, "layers.0.")
    got = run(head, embedded, features, places)
    torch.testing.assert_close(got, hidden, atol=1e-4, rtol=1e-4)
    want = target.lm_head(norm(hidden, tensors["pre_lm_head_layernorm.weight"]))
    torch.testing.assert_close(head.read(got, target.lm_head), want, atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("normed_residual", [False, True])
def test_eagle_3_is_its_formula(tmp_path: Path, target: Any, normed_residual: bool) -> None:
    """States in layer order, attention over (normed embedding, normed feature), its own projection."""
    tensors, stem = heads.eagle3_tensors(), "midlayer."
    config = {**heads.LAYER, "draft_vocab_size": len(heads.KEPT), "norm_before_residual": normed_residual}
    head = load_eagle3(heads.write(tmp_path, config, tensors), target, layers=[0, 1, 1])
    source = torch.Generator().manual_seed(8)
    low, mid, high = (torch.randn(COUNT, heads.HIDDEN, generator=source) for _ in range(3))
    features = torch.cat([low, mid, high], -1) @ tensors["fc.weight"].T
    torch.testing.assert_close(head.fuse([low, mid, high]), features, atol=1e-4, rtol=1e-4)
    embedded, _, places = given()
    seen = norm(features, tensors[f"{stem}hidden_norm.weight"])
    fed = torch.cat([norm(embedded, tensors[f"{stem}input_layernorm.weight"]), seen], -1)
    hidden = (seen if normed_residual else features) + attended(fed, places, tensors, stem, 10_000.0)
    hidden = hidden + mlp(norm(hidden, tensors[f"{stem}post_attention_layernorm.weight"]), tensors, stem)
    got = run(head, embedded, features, places)
    torch.testing.assert_close(got, hidden, atol=1e-4, rtol=1e-4)
    logits = norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(head.read(got, None), logits, atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("seed", [1, 2])
def test_states_are_normed_before_they_are_joined(tmp_path: Path, target: Any, seed: int) -> None:
    """fc_norm: one per state, in their order; norm_before_fc: one over all of them."""
    source = torch.Generator().manual_seed(seed)
    states = [torch.randn(COUNT, heads.HIDDEN, generator=source) for _ in range(3)]
    each = {f"fc_norm.{at}.weight": torch.rand(heads.HIDDEN, generator=source) + 0.5 for at in range(3)}
    whole = {"input_norm.weight": torch.rand(3 * heads.HIDDEN, generator=source) + 0.5}
    for name, extra in (("fc_norm", each), ("norm_before_fc", whole)):
        tensors = heads.eagle3_tensors() | extra
        config = {**heads.LAYER, "draft_vocab_size": len(heads.KEPT), name: True}
        head = load_eagle3(heads.write(tmp_path / name, config, tensors), target, layers=[0, 1, 1])
        joined = torch.cat(states, -1)
        if name == "fc_norm":
            fed = torch.cat([norm(x, each[f"fc_norm.{at}.weight"]) for at, x in enumerate(states)], -1)
        else:
            fed = norm(joined, whole["input_norm.weight"])
        torch.testing.assert_close(head.fuse(states), fed @ tensors["fc.weight"].T, atol=1e-4, rtol=1e-4)
