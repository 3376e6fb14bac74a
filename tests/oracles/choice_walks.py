"""Random trees with a choice at every node for exact_match_verify, and the walk computed from parents and tokens."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], Tensor, Tensor, Tensor | None]:
    parents: list[int] = []
    offsets = [0]
    for size in draw(st.lists(st.sampled_from([0, 1, 2, 6, 20]), max_size=4)):
        parents += [-1 if i == 0 else draw(st.integers(max(0, i - 3), i - 1)) for i in range(size)]
        offsets.append(len(parents))
    nodes = len(parents) + draw(st.integers(0, 2))
    parents += [-1] * (nodes - len(parents))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens, choice = (torch.randint(0, 2, (nodes,), generator=g) for _ in range(2))
    score_only = torch.rand(nodes, generator=g) < 0.2 if draw(st.booleans()) else None
    return parents, offsets, tokens, choice, score_only


def check_walk(
    draft: tuple[list[int], list[int], Tensor, Tensor, Tensor | None],
    path: Tensor,
    accepted: Tensor,
    following: Tensor,
) -> None:
    """Checks that the path follows, from the root, the first child that matches the choice and is not score-only."""
    parents, offsets, tokens, choice, score_only = draft
    depth = path.shape[1] - 1
    for row, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        want = []
        node = 0 if end > start else None
        while node is not None:
            want.append(start + node)
            fitting = [
                i
                for i in range(node + 1, end - start)
                if parents[start + i] == node
                and tokens[start + i] == choice[start + node]
                and not (score_only is not None and score_only[start + i])
            ]
            node = fitting[0] if fitting else None
        assert path[row].tolist() == want + [-1] * (depth + 1 - len(want))
        assert accepted[row] == max(len(want) - 1, 0)
        assert following[row] == (choice[want[-1]] if want else -1)
