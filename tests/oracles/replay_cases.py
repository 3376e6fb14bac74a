"""Ragged batches of trees for replay_verify, with logits and sampling settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import distribution_stats, replay_sample, tree_plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF = float("inf")


@st.composite
def walks(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = DTYPES,
    vocabs: Sequence[int] = (2, 3, 33, 1024, 1025, 3000),
) -> dict[str, Any]:
    """Draws ragged trees whose tokens are often the target's own, filters, greedy and broken rows, score-only nodes."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9]), max_size=4))
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    tail = draw(st.integers(0, 2))
    parents = [int(torch.randint(-1 if i == 0 else 0, max(i, 1), (1,), generator=g)) if i else -1
               for count in counts for i in range(count)]  # fmt: skip
    plan = tree_plan(torch.tensor(parents + [-1] * tail, dtype=torch.int32), offsets)
    nodes, vocab = len(parents) + tail, draw(st.sampled_from(vocabs))

    def pick(*choices: float) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (nodes,), generator=g)]

    level = torch.randn(nodes, vocab + 2, generator=g) * draw(st.sampled_from([0.0, 1.0, 5.0]))
    if draw(st.booleans()):
        level[torch.rand(level.shape, generator=g) < 0.5] = -INF
    if nodes and draw(st.sampled_from([False, False, True])):
        level[int(torch.randint(0, nodes, (1,), generator=g))] = float("nan")
    logits = level.to(draw(st.sampled_from(dtypes)))[:, :vocab]
    filters = (pick(0, 0, 5).int(), pick(1, 1, 0.8), pick(0, 0, 0.1)) if draw(st.booleans()) else None
    sampling = (pick(0, 0.5, 1, 1), *(filters or (pick(0).int(), pick(1.0), pick(0.0))))
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(counts),), generator=g)
    roots = torch.randint(0, 2**31 - 20, (len(counts),), generator=g, dtype=torch.int32)
    tokens = torch.randint(0, vocab, (nodes,), generator=g)
    if len(parents):  # the choice after its parent is a node's token three times out of four
        inv_t, _, cut, tie_id = distribution_stats(logits, *sampling)
        row = plan.row.long().clamp(min=0)
        choice = replay_sample(logits, inv_t, cut, tie_id, seeds[row], roots[row] + plan.depth + 1)
        packed = torch.tensor(parents + [0] * tail) + offsets[:-1].long()[row]
        followed = torch.rand(nodes, generator=g) < 0.75
        tokens = torch.where(followed, choice[packed.clamp(min=0)], tokens)
    return {
        "tokens": tokens,
        "offsets": offsets,
        "first_child": plan.first_child,
        "next_sibling": plan.next_sibling,
        "score_only": torch.rand(nodes, generator=g) < 0.2 if draw(st.booleans()) else None,
        "logits": logits,
        "sampling": sampling,
        "seeds": seeds,
        "root_positions": roots,
        "max_depth": 8,
    }
