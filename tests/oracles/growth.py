"""Random trees grown by tree_grow: its results on each level as lists, and inputs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Growth, distribution_stats, tree_grow


def grown(
    seed: int, dtype: torch.dtype = torch.float32, odd: bool = False, scores: list[Tensor] | None = None
) -> list[Any]:
    """Returns every level's packed trees, counts and plan, for ragged trees with different limits, some of them 0.

    odd: logits also have ties, forbidden tokens and broken distributions. scores: receives the scores of each level.
    """
    pick, source = random.Random(seed), torch.Generator().manual_seed(seed)
    trees, depth, width, vocab = pick.randint(1, 4), pick.randint(1, 4), pick.choice([1, 2, 4, 8]), pick.choice([3, 40])
    limits = torch.tensor([pick.choice([0, 1, 3, 7, 20]) for _ in range(trees)], dtype=torch.int32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    growth = Growth.room(limits, max(int(limits.max()), 1), depth, wide)
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
        if odd:
            logits = strange(logits, pick, source)
        logits = logits.to(dtype)
        warm = torch.tensor([pick.choice([1.0, 1.0, 0.0]) for _ in range(nodes)]) if odd else one
        inv_t, _, cut, tie = distribution_stats(logits, warm, top_k, one, one * 0)
        offsets = torch.tensor([0, *fresh.cumsum(0).tolist()], dtype=torch.int32)
        sizes = {"level": level, "width": width, "last": level == depth - 1, "sharpness": pick.choice([1.0, 2.0])}
        tokens, parents, (now, deepest), plan = tree_grow(logits, inv_t, cut, tie, offsets, growth, **sizes, **noise)
        links = plan.depth, plan.row, plan.ancestors, plan.first_child, plan.next_sibling
        found.append([part.tolist() for part in (tokens, parents, now, deepest, growth.parents, growth.nodes, *links)])
        if scores is not None:
            scores.append(growth.scores.clone())
        fresh, counts = (now - counts).clamp(min=0), now
    return found


def strange(logits: Tensor, pick: random.Random, source: torch.Generator) -> Tensor:
    """Returns the logits with ties, forbidden tokens, and some rows of NaN or only -inf."""
    logits = (logits * 2).round() / 2 if pick.random() < 0.5 else logits.clone()
    logits[torch.rand(logits.shape, generator=source) < pick.choice([0.0, 0.3, 0.9])] = -torch.inf
    for row in range(len(logits)):
        if pick.random() < 0.15:
            logits[row] = pick.choice([torch.nan, -torch.inf, 0.0])
    return logits
