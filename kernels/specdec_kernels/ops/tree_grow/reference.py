"""Plain PyTorch definition of tree_grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...dispatch import argument_checks
from ..tree_expand.reference import check as check_expand
from ..tree_expand.reference import tree_expand
from ..tree_plan.plan import TreePlan
from ..tree_plan.reference import tree_plan


@dataclass(frozen=True, slots=True)
class Growth:
    """B trees while they grow, a row of columns each; `tree_grow` writes all of it but the tokens of the roots.

    Column 0 is the root; what level l found is in columns 1 + l * keep .. (l + 1) * keep, best first, -1 padded.

    tokens: int64 [B, C], -1 where there is none; scores: [B, C], -inf where there is none; parents: int32 [B, C],
    columns, -1 of the root; nodes: int32 [B, C], a column's index in its tree, -1 outside of it; limits: int32 [B],
    nodes that each tree may have in the end, root not counted, at most keep.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    nodes: Tensor
    limits: Tensor
    keep: int

    @staticmethod
    def room(limits: Tensor, keep: int, depth: int, dtype: torch.dtype = torch.float32) -> Growth:
        """Memory for trees of `depth` levels."""

        def table(of: torch.dtype) -> Tensor:
            return torch.empty((limits.shape[0], 1 + depth * keep), dtype=of, device=limits.device)

        return Growth(table(torch.int64), table(dtype), table(torch.int32), table(torch.int32), limits, keep)


def check(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    growth: Growth,
    level: int,
    width: int,
    sharpness: float,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> None:
    """Raises ValueError for arguments that tree_grow cannot take."""
    op, trees, keep = "tree_grow", offsets.shape[0] - 1, growth.keep
    kids = min(width, logits.shape[-1])
    check_expand(logits, inv_t, cut, tie_id, offsets, inv_t, kids, keep, sharpness, None, None, op)
    dtypes = torch.int64, argument_checks.statistics_dtype(logits), torch.int32, torch.int32
    columns = argument_checks.check_tensor(op, "tokens", growth.tokens, torch.int64, trees, "C").shape[1]
    for name, dtype in zip(("tokens", "scores", "parents", "nodes"), dtypes, strict=True):
        part = argument_checks.check_tensor(op, name, getattr(growth, name), dtype, trees, columns)
        if not part.is_contiguous():
            raise ValueError(f"{op}: {name} is not contiguous; expected memory as Growth.room makes it")
    argument_checks.check_tensor(op, "limits", growth.limits, torch.int32, trees)
    if level < 0 or (level + 1) * keep >= columns:
        raise ValueError(
            f"{op}: level is {level} in a table of {columns} columns; expected 0 to {(columns - 1) // keep - 1}"
        )
    if (seeds is None) != (positions is None):
        raise ValueError(f"{op}: got one of seeds and positions; expected both, or neither for growth without noise")
    if seeds is not None and positions is not None:
        argument_checks.check_tensor(op, "seeds", seeds, torch.int64, trees)
        argument_checks.check_tensor(op, "positions", positions, torch.int32, trees)
    if not argument_checks.can_read_values(logits):
        return
    most = min(width, keep) if level else 1
    counts = offsets.diff().tolist()
    if max(counts, default=0) > most or sum(counts) != logits.shape[0]:
        raise ValueError(
            f"{op}: trees grow from {counts} nodes, with {logits.shape[0]} rows of logits; expected at most {most} per "
            f"tree on level {level}, and a row of logits for each"
        )
    if trees and int(growth.limits.max()) > keep:
        raise ValueError(f"{op}: a limit is {int(growth.limits.max())}; expected at most keep, {keep}")


def begin(growth: Growth) -> None:
    """Nothing but roots."""
    for table, nothing in ((growth.tokens, -1), (growth.scores, -torch.inf), (growth.nodes, -1)):
        table[:, 1:].fill_(nothing)
    growth.parents.fill_(-1)
    growth.scores[:, 0].zero_()
    growth.nodes[:, 0].zero_()


def rivals(
    growth: Growth, offsets: Tensor, nodes: int, level: int, seeds: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The nodes to grow from: their scores [N], their columns int64 [N] and the noise of their children."""
    at = torch.arange(nodes, device=offsets.device)
    tree = torch.searchsorted(offsets[1:].long(), at, right=True)
    column = at - offsets[tree] + (1 + (level - 1) * growth.keep if level else 0)
    noise = {}
    if seeds is not None and positions is not None:
        noise = {"seeds": seeds[tree], "positions": torch.where(positions < 0, -1, positions + level + 1)[tree]}
    return growth.scores[tree, column], column, noise


def tree_grow(
    logits: Tensor,
    inv_t: Tensor,
    cut: Tensor,
    tie_id: Tensor,
    offsets: Tensor,
    growth: Growth,
    *,
    level: int,
    width: int,
    last: bool = False,
    sharpness: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, TreePlan]:
    """One level of trees that keep the best: enters the children of the nodes that grow, and packs what comes of it.

    Children and their scores are those of `tree_expand`; the `keep` best of a tree's make up the level's columns. The
    first `width` of them that may still have something below them in the end, being better than the least of the
    `limits` best so far, are the nodes to grow from on the next level, in this order. After the last level the trees
    are the `limits` best nodes of all that were found, earlier columns first among equals, so that parents are kept.

    Args:
        logits: [N, V], the logits after the nodes that grow, as tree_expand takes them.
        inv_t: [N], from distribution_stats, as the next two.
        cut: [N].
        tie_id: int32 [N].
        offsets: int32 [B + 1], the nodes that grow of each of B trees, N in all: on level 0 its root or nothing, then
            those that the level before has packed last.
        growth: written to; level 0 begins anew with the tokens of the roots, in column 0.
        level: of the table's, from 0 on.
        width: children per node, if there are so many tokens, and nodes that grow per level.
        last: nothing grows any more.
        sharpness: see tree_expand.
        seeds: int64 [B], request seeds of the replay noise, or None.
        positions: int32 [B], absolute positions of the roots; a negative position gets no replay noise.

    Returns:
        tokens: int64 [R], parents: int32 [R], index within the tree: packed trees, levels in order and the best of a
            level first; 0 and -1 behind the last node. R is B * (1 + keep) after the last level, before it
            B * (1 + (level + 1) * min(width, keep)). Before the last level these are the roots and all nodes that have
            grown or will, of trees of which some node will: the others have no nodes.
        counts: int32 [2, B], nodes of each tree, and the depth of its deepest.
        plan: TreePlan of these trees, with ancestor words for R / B nodes.

    Raises:
        ValueError: wrong shape, dtype or number.

    Source: EAGLE-2 (Li et al., 2024) section 4.
    """
    check(logits, inv_t, cut, tie_id, offsets, growth, level, width, sharpness, seeds, positions)
    tokens, scores, parents, nodes = growth.tokens, growth.scores, growth.parents, growth.nodes
    keep, device, (trees, columns) = growth.keep, logits.device, tokens.shape
    if level == 0:
        begin(growth)
    first, reach, kids = 1 + level * keep, min(width, keep), min(width, logits.shape[1])
    block = slice(first, first + keep)
    own, column, noise = rivals(growth, offsets, logits.shape[0], level, seeds, positions)
    children, found, best = tree_expand(
        logits, inv_t, cut, tie_id, offsets, own, width=kids, keep=keep, sharpness=sharpness, **noise
    )
    if column.shape[0]:
        at, there = best.clamp(min=0).long(), best >= 0
        tokens[:, block] = torch.where(there, children.flatten()[at], -1)
        scores[:, block] = torch.where(there, found.flatten()[at], -torch.inf)
        parents[:, block] = torch.where(there, column[at // kids], -1).to(torch.int32)
    if last:
        rank = scores[:, 1:].argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        nodes[:, 1:] = torch.where((rank < growth.limits[:, None]) & (scores[:, 1:] > -torch.inf), 0, -1)
        packed = nodes >= 0
        nodes[:] = torch.where(packed, packed.cumsum(1) - 1, -1)
    else:
        front = scores[:, first : first + reach]
        as_good = (scores[:, 1 : first + keep, None] >= front[:, None]).sum(1)
        live = (front > -torch.inf) & (as_good < growth.limits[:, None])
        before = (nodes >= 0).sum(1, keepdim=True)
        nodes[:, first : first + reach] = torch.where(live, before + torch.arange(reach, device=device), -1)
        packed = (nodes >= 0) & live.any(1, keepdim=True)
    depth = (torch.arange(columns, device=device) + keep - 1) // keep
    counts = torch.stack([packed.sum(1), torch.where(packed, depth, 0).amax(1)]).to(torch.int32)
    most = 1 + (keep if last else (level + 1) * reach)
    if argument_checks.can_read_values(logits) and trees and int(counts[0].max()) > most:
        tree = int(counts[0].argmax())
        raise ValueError(
            f"tree_grow: tree {tree} of the table has {int(counts[0, tree])} nodes on level {level}; "
            f"expected at most {most} with levels of width {reach}; give levels in order, from 0 on, with one width"
        )
    places = trees * most
    answer = torch.zeros(places, dtype=torch.int64, device=device), nodes.new_full((places,), -1)
    above = torch.where(parents >= 0, nodes.gather(1, parents.clamp(min=0).long()), -1)
    for whole, part in zip(answer, (tokens[packed], above[packed]), strict=True):
        whole[: part.shape[0]] = part
    bounds = torch.nn.functional.pad(counts[0].cumsum(0), (1, 0)).to(torch.int32)
    return *answer, counts, tree_plan(answer[1], bounds, most)
