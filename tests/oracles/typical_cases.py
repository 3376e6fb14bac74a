"""Random ragged trees for `typical_verify` with many typical tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from oracles.proposal_cases import DTYPES, proposals

TAKEN = ("offsets", "first_child", "next_sibling", "target", "score_only", "seeds", "root_positions")


def parents_of(first_child: list[int], next_sibling: list[int]) -> list[int]:
    """Returns the parent of every node; nodes without a parent are their own parent."""
    parents = list(range(len(first_child)))
    for node, child in enumerate(first_child):
        while child >= 0:
            parents[child], child = node, next_sibling[child]
    return parents


@st.composite
def typical_trees(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Draws arguments by name. Empty rows, invalid distributions, ties and score-only nodes come from `proposals`."""
    case = draw(proposals(dtypes))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tokens, logits = case["tokens"], case["target"][0].float()
    if len(tokens):
        parents = parents_of(case["first_child"].tolist(), case["next_sibling"].tolist())
        likeliest = logits.topk(min(draw(st.sampled_from([1, 4])), logits.shape[1])).indices[parents]
        pick = torch.randint(0, likeliest.shape[1], (len(tokens), 1), generator=g)
        tokens = torch.where(torch.rand(len(tokens), generator=g) < 0.8, likeliest.gather(1, pick)[:, 0], tokens)
    limit = {
        "epsilon": draw(st.sampled_from([0.0, 0.01, 0.09, 0.6])),
        "delta": draw(st.sampled_from([0.0, 0.03, 0.3, 0.7])),
    }
    return {"tokens": tokens, **{name: case[name] for name in TAKEN}, **limit, "max_depth": 6}
