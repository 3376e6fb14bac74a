"""Heads over the paged cache: trees equal sequential passes, and keys are stored from the target's true states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import heads, models

from specdec_fast import Engine, SamplingParams
from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.draft_runners.head_runner import PagedHead
from specdec_fast.drafters import make_drafter

NAMES = ("eagle", "eagle3", "mtp")


def opened(name: str, folder: Path, **shape: Any) -> tuple[Any, Any, Any]:
    """(target, drafter, the same head outside of the cache)."""
    target = models.target("llama", **shape)
    drafter: Any = make_drafter(name, heads.options(name, folder), target=target)
    outside = copy.deepcopy(drafter.model.head)
    outside.config._attn_implementation = "eager"
    return target, drafter, outside


def sequential(
    outside: Any, model: PagedHead, tokens: list[int], features: torch.Tensor, cache: Any = None
) -> torch.Tensor:
    """Plain causal attention over one row, [length, hidden]."""
    count = len(tokens)
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    embedded = model.embed(torch.tensor([tokens]))
    found: torch.Tensor = outside(
        embedded, features[None], torch.arange(count)[None], attention_mask=mask, past_key_values=cache
    )
    return found[0]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_tree_is_scored_as_its_paths_one_by_one(name: str, tmp_path: Path) -> None:
    _, drafter, outside = opened(name, tmp_path)
    paged: PagedHead = drafter.model
    source = torch.Generator().manual_seed(4)
    true = [torch.randn(length, heads.HIDDEN, generator=source) for length in (3, 17)]
    texts = [models.prompt(length) for length in (3, 17)]
    for row, length in enumerate((3, 17)):
        assert paged.cache.reserve(row, length + 8)
    shape = chain_layout((0, 1), (3, 17), torch.device("cpu"))
    stored = paged.extend(shape.rows, torch.tensor([*texts[0], *texts[1]]), torch.cat(true), shape.offsets)
    trees = [([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2]), ([0, 0, 3], [-1, 0, 1])]
    draft = Draft.trees([0, 1], trees)
    features = torch.randn(8, heads.HIDDEN, generator=source)
    got = paged.score(draft, features)
    node = 0
    for row, (tokens, parents) in enumerate(trees):
        want = sequential(outside, paged, texts[row], true[row])
        start = 3 * row
        assert torch.allclose(stored[start : start + len(want)], want, atol=1e-4, rtol=1e-4)
        for at in range(len(tokens)):
            path = [at]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            fed = torch.cat([true[row], features[[node - at + each for each in path]]])
            want = sequential(outside, paged, [*texts[row], *(tokens[each] for each in path)], fed)
            assert torch.allclose(got[node], want[-1], atol=1e-4, rtol=1e-4), (row, at)
            node += 1


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_what_is_stored_is_a_recompute_from_true_states(name: str, tmp_path: Path) -> None:
    """After every step of a ragged batch. At a high temperature the shared noise decides, so drafts are accepted."""
    from transformers import DynamicCache

    target, drafter, outside = opened(name, tmp_path, max_rows=3, page_size=4)
    lengths = (1, 5, 17)
    engine = Engine(target, drafter)
    for length in lengths:
        engine.submit(models.prompt(length), SamplingParams(temperature=5.0, seed=length, max_new_tokens=40))
    checked = 0
    while not engine.idle:
        before = {row: list(engine.state.tokens(row)) for row in engine._running}
        engine.step()
        for row, text in before.items():
            if row not in engine._running or len(text) < 2:
                continue
            hidden = models.untouched("llama")(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            by_name = {"final_norm": hidden[2][0], "entering:0": hidden[0][0], "entering:1": hidden[1][0]}
            cache = DynamicCache()
            sequential(outside, drafter.model, text[1:], drafter.model.features(by_name), cache)
            keys, values = drafter.model.cache.read(row, 0)
            count = len(text) - 2  # the root is staged, not stored
            assert keys.shape[0] == count
            assert torch.allclose(keys, cache.layers[0].keys[0].transpose(0, 1)[:count], atol=2e-4, rtol=1e-3)
            assert torch.allclose(values, cache.layers[0].values[0].transpose(0, 1)[:count], atol=2e-4, rtol=1e-3)
            checked += 1
    assert checked > 10 and engine.stats.tau > 1.5
    assert drafter.model.cache.pages.num_used == 0
