"""Batch invariance: on a CPU a node has the same bits alone, in a tree, in a batch and in slices of a prompt."""

from __future__ import annotations

import pytest
import torch
from oracles import models
from torch import Tensor

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_fast.loading import load_model
from specdec_fast.targets.huggingface import HuggingFaceTarget
from specdec_kernels import tree_plan

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]
FUSED = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "demo-target"]


def feed(target: HuggingFaceTarget, row: int, tokens: list[int]) -> Tensor:
    """Logits after the last token."""
    shape = chain_layout((row,), (len(tokens),), target.device)
    logits = target.extend(shape.rows, torch.tensor(tokens), shape.offsets, logits=True).logits
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "whole"),
    [*((name, False) for name in [*FAMILIES, "demo-target"]), *((name, True) for name in FUSED)],
)
def test_logits_do_not_depend_on_the_batch(family: str, whole: bool, dtype: torch.dtype, threads: int) -> None:
    model = load_model(family) if family.startswith("demo") else models.own(family)
    target = HuggingFaceTarget(model.to(dtype), max_rows=4, max_length=128, fused_forward=whole)
    prompt, more = models.prompt(40), models.prompt(47)[40:]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for row in range(4):
            assert target.cache.reserve(row, 64)
        for row in (0, 1):
            feed(target, row, prompt)
        feed(target, 2, prompt[:1])
        for token in prompt[1:]:  # a prompt token by token
            feed(target, 2, [token])
        feed(target, 3, prompt[:7])
        one_by_one = torch.stack([feed(target, 0, [token]) for token in more])
        chain, other = [more, more], prompt[7:20]
        draft = Draft.trees(
            rows=[1, 3, 2],
            trees=[
                (chain[0], [at - 1 for at in range(len(more))]),
                (other, [-1, *(at // 2 for at in range(len(other) - 1))]),
                (chain[1], [at - 1 for at in range(len(more))]),
            ],
        )
        logits = target.score(draft, tree_plan(draft.parents, draft.offsets))[0].logits
        assert logits is not None
        assert torch.equal(logits[: len(more)], one_by_one), "a chain beside a tree"
        assert torch.equal(logits[-len(more) :], one_by_one), "after a prompt that was fed token by token"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("length", [7, 57])
@pytest.mark.parametrize(
    ("family", "whole", "dtype"),
    [
        ("llama", False, torch.float64),
        ("llama", False, torch.float32),
        *((family, True, torch.float32) for family in ("llama", "mistral", "gemma2", "gemma3")),
        *((family, True, torch.bfloat16) for family in ("llama", "gemma3")),
    ],
)
def test_a_branch_has_the_bits_of_a_chain(family: str, whole: bool, length: int, dtype: torch.dtype) -> None:
    """Branches cross a block of 64 keys, and for windows their beginning, at other slots than a chain."""
    target = HuggingFaceTarget(models.own(family).to(dtype), max_rows=2, max_length=128, fused_forward=whole)
    assert target.cache.reserve(0, 96)
    feed(target, 0, models.prompt(length))
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    tokens = models.prompt(60)[-len(parents) :]

    def score(tree: tuple[list[int], list[int]]) -> Tensor:
        draft = Draft.trees(rows=[0], trees=[tree])
        logits = target.score(draft, tree_plan(draft.parents, draft.offsets))[0].logits
        assert logits is not None
        return logits.clone()

    together = score((tokens, parents))
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = score(([tokens[each] for each in path], list(range(-1, len(path) - 1))))
        assert torch.equal(together[node], alone[-1]), f"node {node} of path {path}"


@pytest.mark.parametrize(
    ("family", "whole", "dtype"),
    [
        *((family, False, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)),
        *((family, True, torch.float32) for family in ("llama", "mistral", "gemma2", "gemma3")),
        *((family, True, torch.bfloat16) for family in ("llama", "mistral", "gemma3")),
    ],
)
def test_slices_of_a_prompt_have_the_bits_of_one_pass(family: str, whole: bool, dtype: torch.dtype) -> None:
    """Prefix sharing and requests that are prefilled together cut prompts at any place."""
    target = HuggingFaceTarget(models.own(family).to(dtype), max_rows=1, max_length=256, fused_forward=whole)
    prompt = models.prompt(200)

    def logits_of(ends: list[int]) -> Tensor:
        assert target.cache.reserve(0, 200)
        found = []
        for begin, end in zip([0, *ends], ends, strict=False):
            shape, every = chain_layout((0,), (end - begin,), target.device), torch.arange(end - begin)
            found.append(target.extend(shape.rows, torch.tensor(prompt[begin:end]), shape.offsets, logits=every).logits)
        target.cache.release([0])
        return torch.cat(found)

    one = logits_of([200])
    assert torch.equal(logits_of([1, 65, 130, 194, 200]), one)
    assert torch.equal(logits_of([*range(40, 201, 40)]), one)
