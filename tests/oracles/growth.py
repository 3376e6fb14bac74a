"""Random trees grown by tree_grow: what it returns on each level, as lists, and the inputs of a case."""

from __future__ import annotations

import random
from typing import Any

import torch

from specdec_kernels import Growth, law_stats, tree_grow


def grown(seed: int) -> list[Any]:
    """Every level's packed trees, counts and plan, for ragged trees whose limits differ, some of them nothing."""
    pick, source = random.Random(seed), torch.Generator().manual_seed(seed)
    trees, depth, width, vocab = pick.randint(1, 4), pick.randint(1, 4), pick.choice([1, 2, 4, 8]), pick.choice([3, 40])
    limits = torch.tensor([pick.choice([0, 1, 3, 7, 20]) for _ in range(trees)], dtype=torch.int32)
    growth = Growth.room(limits, max(int(limits.max()), 1), depth)
    growth.tokens[:, 0] = torch.arange(trees) + 100
    growth.scores[:, 1:], growth.nodes[:] = 7.0, 3  # of an earlier step
    noise = {}
    if seed % 2:
        positions = torch.tensor([pick.choice([-1, 0, 9]) for _ in range(trees)], dtype=torch.int32)
        noise = {"seeds": torch.randint(-(2**63), 2**63 - 1, (trees,), generator=source), "positions": positions}
    counts = (limits > 0).int()
    fresh, found = counts.clone(), []
    for level in range(depth):
        nodes = int(fresh.sum())
        logits = torch.randn(nodes, vocab, generator=source) * 3
        top_k = torch.tensor([pick.choice([0, 0, 2]) for _ in range(nodes)], dtype=torch.int32)
        one = torch.ones(nodes)
        inv_t, _, cut, tie = law_stats(logits, one, top_k, one, one * 0)
        offsets = torch.tensor([0, *fresh.cumsum(0).tolist()], dtype=torch.int32)
        sizes = {"level": level, "width": width, "last": level == depth - 1, "sharpness": pick.choice([1.0, 2.0])}
        tokens, parents, (now, deepest), plan = tree_grow(logits, inv_t, cut, tie, offsets, growth, **sizes, **noise)
        links = plan.depth, plan.row, plan.ancestors, plan.first_child, plan.next_sibling
        found.append([part.tolist() for part in (tokens, parents, now, deepest, growth.parents, growth.nodes, *links)])
        fresh, counts = (now - counts).clamp(min=0), now
    return found
