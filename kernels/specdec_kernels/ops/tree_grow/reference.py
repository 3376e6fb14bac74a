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
    """State of B growing trees, one row of C columns per tree. `tree_grow` writes everything but the root tokens.

    Column 0 is the root. Level l fills the columns 1 + l * keep to (l + 1) * keep, best first.

    Attributes:
        tokens: Token of each column, int64 [B, C]; -1 for an empty column.
        scores: Score of each column, [B, C]; -inf for an empty column.
        parents: Column of each column's parent, int32 [B, C]; -1 for the root.
        nodes: Index of each column in its packed tree, int32 [B, C]; -1 for columns outside of it.
        limits: Most nodes of each final tree without its root, int32 [B], at most `keep`.
        keep: Columns per level.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    nodes: Tensor
    limits: Tensor
    keep: int

    @staticmethod
    def room(limits: Tensor, keep: int, depth: int, dtype: torch.dtype = torch.float32) -> Growth:
        """Allocates the state of trees with `depth` levels, on the device of `limits`. Scores have this dtype."""

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


def reset(growth: Growth) -> None:
    """Empties all columns but the roots."""
    for table, empty in ((growth.tokens, -1), (growth.scores, -torch.inf), (growth.nodes, -1)):
        table[:, 1:].fill_(empty)
    growth.parents.fill_(-1)
    growth.scores[:, 0].zero_()
    growth.nodes[:, 0].zero_()


def expanded_nodes(
    growth: Growth, offsets: Tensor, nodes: int, level: int, seeds: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the nodes that a level expands: scores [N], columns int64 [N], and seeds and positions of their noise."""
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
    """Grows trees by one level: expands the frontier nodes, stores the best children, and packs the trees.

    Children and their scores are those of `tree_expand`. The `keep` best children of a tree fill the columns of the
    level.

    Before the last level, the next frontier is chosen among the first `width` of these columns. A column joins it if
    fewer than `limits` columns so far score at least as high, itself included. All others cannot have a child in the
    final tree. The frontier keeps the order of the columns.

    After the last level, each tree consists of its `limits` best nodes of all levels. Among equals the earlier column
    wins, so every kept node keeps its parent.

    Args:
        logits: Logits of the expanded nodes, [N, V], as for tree_expand.
        inv_t: Inverse temperature from distribution_stats, [N].
        cut: Smallest kept logit, from distribution_stats, [N].
        tie_id: Largest kept id among logits equal to `cut`, from distribution_stats, int32 [N].
        offsets: First expanded node of each of B trees, int32 [B + 1]. Level 0 expands the root or nothing. A later
            level expands the frontier: the last nodes that the level before packed.
        growth: State of the trees, updated in place. Level 0 resets all columns but the tokens of the roots.
        level: Index of the level, from 0.
        width: Children per node (at most V), and expanded nodes per level.
        last: Whether this is the last level.
        sharpness: See tree_expand.
        seeds: Request seeds of the replay noise, int64 [B], or None for no noise.
        positions: Absolute positions of the roots, int32 [B]. A negative position gets no noise.

    Returns:
        tokens: Tokens of the packed trees, int64 [R], level by level, best first; 0 after the last node. R is
            B * (1 + keep) after the last level, and B * (1 + (level + 1) * min(width, keep)) before it.
        parents: Index of each node's parent within its tree, int32 [R]; -1 for roots and after the last node.
        counts: Nodes and depth of each tree, int32 [2, B].
        plan: `TreePlan` of these trees, with ancestor words for R / B nodes.
        Before the last level the packed trees hold the roots, all expanded nodes and the frontier. A tree with an
        empty frontier has no nodes then.

    Raises:
        ValueError: If a shape, dtype or number is wrong.

    Source:
        EAGLE-2 (Li et al. 2024), section 4.
    """
    check(logits, inv_t, cut, tie_id, offsets, growth, level, width, sharpness, seeds, positions)
    tokens, scores, parents, nodes = growth.tokens, growth.scores, growth.parents, growth.nodes
    keep, device, (trees, columns) = growth.keep, logits.device, tokens.shape
    if level == 0:
        reset(growth)
    first, reach, kids = 1 + level * keep, min(width, keep), min(width, logits.shape[1])
    block = slice(first, first + keep)
    node_scores, column, noise = expanded_nodes(growth, offsets, logits.shape[0], level, seeds, positions)
    children, child_scores, best = tree_expand(
        logits, inv_t, cut, tie_id, offsets, node_scores, width=kids, keep=keep, sharpness=sharpness, **noise
    )
    if column.shape[0]:
        at, exists = best.clamp(min=0).long(), best >= 0
        tokens[:, block] = torch.where(exists, children.flatten()[at], -1)
        scores[:, block] = torch.where(exists, child_scores.flatten()[at], -torch.inf)
        parents[:, block] = torch.where(exists, column[at // kids], -1).to(torch.int32)
    if last:
        rank = scores[:, 1:].argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        nodes[:, 1:] = torch.where((rank < growth.limits[:, None]) & (scores[:, 1:] > -torch.inf), 0, -1)
        packed = nodes >= 0
        nodes[:] = torch.where(packed, packed.cumsum(1) - 1, -1)
    else:
        frontier = scores[:, first : first + reach]
        as_good = (scores[:, 1 : first + keep, None] >= frontier[:, None]).sum(1)
        live = (frontier > -torch.inf) & (as_good < growth.limits[:, None])
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
    results = torch.zeros(places, dtype=torch.int64, device=device), nodes.new_full((places,), -1)
    parent_nodes = torch.where(parents >= 0, nodes.gather(1, parents.clamp(min=0).long()), -1)
    for result, part in zip(results, (tokens[packed], parent_nodes[packed]), strict=True):
        result[: part.shape[0]] = part
    bounds = torch.nn.functional.pad(counts[0].cumsum(0), (1, 0)).to(torch.int32)
    return *results, counts, tree_plan(results[1], bounds, most)
