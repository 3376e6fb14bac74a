"""Triton backend of tree_grow: the launches of tree_expand and tree_plan, two of its own and torch's small ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton import next_power_of_2

from ..machine_code import Variant
from ..tree_expand.launch import tree_expand
from ..tree_plan.launch import tree_plan
from ..tree_plan.plan import TreePlan
from .reference import Growth, begin, check, rivals


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
    """The operator; waits for nothing."""
    from .triton_kernel import enter, pack

    check(logits, inv_t, cut, tie_id, offsets, growth, level, width, sharpness, seeds, positions)
    (trees, columns), keep, kids = growth.tokens.shape, growth.keep, min(width, logits.shape[1])
    reach = min(width, keep)
    if level == 0:
        begin(growth)
    own, _, noise = rivals(growth, offsets, logits.shape[0], level, seeds, positions)
    law = inv_t, cut, tie_id, offsets, own
    children, found, best = tree_expand(logits, *law, width=kids, keep=keep, sharpness=sharpness, **noise)
    most = 1 + (keep if last else (level + 1) * reach)
    packed = torch.zeros(trees * most, dtype=torch.int64, device=logits.device)
    links = torch.full_like(packed, -1, dtype=torch.int32)
    counts = torch.zeros((2, trees), dtype=torch.int32, device=logits.device)
    table = growth.tokens, growth.scores, growth.parents, growth.nodes
    room = next_power_of_2(columns)
    if trees:
        enter[(trees,)](
            offsets.contiguous(), children, found, best, growth.limits.contiguous(), *table, counts, columns, keep,
            level, kids, reach, LAST=last, KEEP=next_power_of_2(keep), COLUMNS=room, num_warps=8,
        )  # fmt: skip
        pack[(trees,)](
            growth.tokens, growth.parents, growth.nodes, counts, packed, links, trees, columns, keep, most,
            COLUMNS=room, TREES=next_power_of_2(trees), num_warps=4,
        )  # fmt: skip
    bounds = pad(counts[0].cumsum(0), (1, 0)).to(torch.int32)
    return packed, links, counts, tree_plan(links, bounds, most)


def _entering(last: bool) -> Variant:
    integers = ("offsets", "best", "limits", "parents", "nodes", "counts")
    return Variant(
        f"tree_grow/enter{' last' if last else ''}", "tree_grow.triton_kernel:enter",
        {
            **dict.fromkeys(integers, "*i32"), **dict.fromkeys(("children", "tokens"), "*i64"),
            **dict.fromkeys(("found", "scores"), "*fp32"),
            **dict.fromkeys(("columns", "keep", "level", "width", "reach"), "i32"),
        },
        {"LAST": last, "KEEP": 64, "COLUMNS": 512}, 8, everyday=("sm_90",) if last else (),
    )  # fmt: skip


VARIANTS = [
    _entering(False),
    _entering(True),
    Variant(
        "tree_grow/pack", "tree_grow.triton_kernel:pack",
        {
            "tokens": "*i64", **dict.fromkeys(("parents", "nodes", "counts"), "*i32"), "packed": "*i64",
            "links": "*i32",
            **dict.fromkeys(("trees", "columns", "keep", "most"), "i32"),
        },
        {"COLUMNS": 512, "TREES": 64},
    ),
]  # fmt: skip
