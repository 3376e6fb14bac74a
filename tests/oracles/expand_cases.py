"""Ragged trees as inputs of `tree_expand`, and comparisons of two backends' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracles.distribution_batches import batches
from specdec_kernels import distribution_stats


@st.composite
def expansions(draw: st.DrawFn) -> dict[str, Any]:
    """Draws nodes with any distributions (ties, NaN, -inf, greedy), trees without nodes, dead parents, widths above the
    number that is kept.
    """
    level, *parameters = draw(batches())
    nodes, vocab = level.shape
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    inv_t, _, cut, tie_id = distribution_stats(level, *parameters)
    bounds = sorted(draw(st.lists(st.integers(0, nodes), max_size=4)))
    scores = torch.tensor([draw(st.sampled_from([0.0, 0.0, -1.5, -700.25, -torch.inf])) for _ in range(nodes)])
    case = {
        "logits": level,
        "inv_t": inv_t,
        "cut": cut,
        "tie_id": tie_id,
        "offsets": torch.tensor([0, *bounds, nodes], dtype=torch.int32),
        "scores": scores.to(inv_t.dtype),
        "width": min(vocab, draw(st.sampled_from([1, 2, 3, 10, 64, vocab]))),
        "keep": draw(st.sampled_from([1, 2, 7, 33, 200])),
        "sharpness": draw(st.sampled_from([1.0, 1.0, 0.5, 1.7])),
    }
    if draw(st.booleans()):
        few = torch.randint(-(2**63), 2**63 - 1, (2,), generator=g)
        case["seeds"] = few[torch.randint(0, 2, (nodes,), generator=g)]
        positions = [draw(st.sampled_from([-1, 0, 5, 5, 2**31 - 1])) for _ in range(nodes)]
        case["positions"] = torch.tensor(positions, dtype=torch.int32)
    return case


def compare(got: Sequence[Tensor], want: Sequence[Tensor], case: dict[str, Any]) -> None:
    """Checks equal children, scores up to rounding of values and normalisers, and the best children of a tree in the
    order of the result's own scores.
    """
    assert [part.dtype for part in got] == [part.dtype for part in want]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1] == -torch.inf, want[1] == -torch.inf)
    children = case["logits"].to(want[1].dtype).gather(1, want[0].clamp(min=0))
    noise = 23.0 if "seeds" in case else 0.0
    size = 1 + case["sharpness"] * ((children * case["inv_t"][:, None]).abs() + noise) + case["scores"].abs()[:, None]
    size = torch.maximum(size, size[:, :1])  # a normaliser is about as large as the first child's value
    rounding = 64 if want[1].dtype == torch.float64 else 4  # normalisers are summed in float64
    near = (got[1] - want[1]).abs() <= rounding * torch.finfo(want[1].dtype).eps * size
    assert bool(near[want[1] > -torch.inf].all())
    bounds, width = case["offsets"].tolist(), got[0].shape[1]
    for tree, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = got[1][start:stop].flatten()
        order = own.sort(descending=True, stable=True).indices[: got[2].shape[1]]
        order = (order[own[order] > -torch.inf] + start * width).tolist()
        assert got[2][tree].tolist() == order + [-1] * (got[2].shape[1] - len(order))
