"""Dynamic trees (Li et al. 2024, EAGLE-2, section 4): they grow from the best nodes of each level and keep the best of
all that were seen.

Nobody asks a device how many these are: every level has room for all that may grow, places to spare have no children,
and nodes behind the last tree belong to nobody. Where memory is the host's own there is nobody to wait for, and passes
are as large as their trees. The same for steps that are captured and for steps that are not.
Tests: tests/drafters/test_eagle.py, tests/drafters/test_host_reads.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_kernels import Growth, TreePlan, tree_grow


@dataclass(frozen=True, slots=True)
class Front:
    """Nodes that may get children, tree after tree.

    level: 0 for the roots; sizes: how many of each tree; bounds: int32 [B + 1], where they begin; places: where they
    are among the nodes of the last pass, those that are not there at their tree's root; there: bool, or None for all.
    """

    level: int
    sizes: tuple[int, ...]
    bounds: Tensor
    places: Tensor | list[int]
    there: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Grown:
    """Packed trees, the best of all: tokens int64 and parents int32 [B * most], 0 and -1 behind the last node; counts:
    int32 [2, B], the nodes of each, root included, and the depth of its deepest; staged: what was scored, by level.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    plan: TreePlan
    staged: list[Draft]


class Passes(Protocol):
    """Who knows the model that B trees grow by."""

    def dists(self, front: Front) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits [N, V] after nodes of the last pass, and (1/T, cut, tie) that their children are picked by."""
        ...

    def score(self, draft: Draft) -> None:
        """The next pass, over trees whose `counts` are bounds."""
        ...

    def room(self, dtype: torch.dtype) -> Growth:
        """Memory for the trees, with the tokens of their roots."""
        ...


def reads_freely(device: torch.device) -> bool:
    """Whether the host need not wait for what is in this memory."""
    return device.type == "cpu"


def grow(
    passes: Passes,
    rows: Tensor,
    front: Front,
    *,
    depth: int,
    width: int,
    sharpness: float,
    noise: dict[str, Tensor],
    row_ids: tuple[int, ...] | None = None,
) -> Grown:
    """rows: int32 [B]; front: the roots of the trees that are more than that; depth, width, sharpness: as in
    `growing.TreeDrafter`; noise: seeds and positions as tree_grow takes them, or nothing; row_ids: rows on the host,
    which then looks at the size of every level.
    """
    staged = list[Draft]()
    growth: Growth
    for level in range(depth):
        last = level == depth - 1 or not any(front.sizes)
        if any(front.sizes):
            logits, inv_t, cut, tie = passes.dists(front)
            if level == 0:
                growth = passes.room(inv_t.dtype)
            if front.there is not None:  # a place to spare has no children
                cut = torch.where(front.there, cut, float("inf"))
        else:  # what was found is all there is
            logits, inv_t, cut, tie = logits[:0], inv_t[:0], cut[:0], tie[:0]
        sizes = {"level": level, "width": width, "last": last, "sharpness": sharpness}
        tokens, parents, counts, plan = tree_grow(logits, inv_t, cut, tie, front.bounds, growth, **sizes, **noise)
        if last:
            break
        if row_ids is None:
            draft = _bounded(rows, tokens, parents, counts, plan, level + 1)
            front = _room_to_grow(level, width, growth, draft.offsets)
        else:
            now, deepest = counts.tolist()
            draft = Draft.packed(row_ids, tokens, parents, tuple(now), max(deepest), plan)
            front = _grown(level, front, staged[-1].counts if staged else (1,) * len(now), draft)
        if any(front.sizes):
            staged.append(draft)
            passes.score(draft)
    return Grown(tokens, parents, counts, plan, staged)


def _grown(level: int, before: Front, had: tuple[int, ...], draft: Draft) -> Front:
    """The nodes that a level has added, which are the last of each tree. had: nodes of each at the level before."""
    sizes = tuple([max(new - old, 0) for new, old in zip(draft.counts, had)])
    stops = accumulate(draft.counts)
    places = [node for stop, size in zip(stops, sizes) for node in range(stop - size, stop)]
    bounds = chain_layout(tuple(range(len(sizes))), sizes, draft.tokens.device).offsets
    return Front(level + 1, sizes, bounds, places)


def _room_to_grow(level: int, width: int, growth: Growth, offsets: Tensor) -> Front:
    """Places for all nodes that a level may have added to trees that begin at `offsets`."""
    trees, each, first = growth.tokens.shape[0], min(width, growth.keep), 1 + level * growth.keep
    ends = growth.nodes[:, first : first + each]
    most = trees * (1 + (level + 1) * each)
    places = (ends.clamp(min=0) + offsets[:-1, None]).flatten().clamp(max=most - 1).long()
    bounds = torch.arange(trees + 1, dtype=torch.int32, device=offsets.device) * each
    return Front(level + 1, (each,) * trees, bounds, places, (ends >= 0).flatten())


def _bounded(rows: Tensor, tokens: Tensor, parents: Tensor, counts: Tensor, plan: TreePlan, depth: int) -> Draft:
    """Trees of chosen tokens, with room for as many nodes of each."""
    return Draft(
        rows=rows,
        tokens=tokens,
        parents=parents,
        offsets=pad(counts[0].cumsum(0, dtype=torch.int32), (1, 0)),
        proposal_kinds=torch.zeros_like(parents, dtype=torch.int8),
        dist_index=torch.full_like(parents, -1),
        row_of=plan.row.clamp(min=0).long(),
        counts=(tokens.shape[0] // rows.shape[0],) * rows.shape[0],
        max_depth=depth,
        plan=plan,
    )
