"""Triton backend of tree_grow: the launches of tree_expand and tree_plan, and three of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, carve_workspace, declare_scratch, result_tensors, total_bytes
from ...triton_shared.aot_config import Variant
from ...triton_shared.jit import lanes_for
from ..tree_expand.launch import scratch as expand_scratch
from ..tree_expand.launch import tree_expand
from ..tree_plan.launch import plan_specs, tree_plan
from ..tree_plan.plan import TreePlan
from .reference import Growth, check, reset


def _scratch(
    logits: Tensor, inv_t: Tensor, cut: Tensor, tie_id: Tensor, offsets: Tensor, growth: Growth, *, width: int,
    **kwargs: Any,
) -> list[TensorSpec]:  # fmt: skip
    """Returns the specs of all scratch tensors.

    Per expanded node: score, seed, position, children and their scores. Per tree: its best children and its bounds.
    Last comes the workspace of tree_expand.
    """
    (nodes, vocab), trees = logits.shape, offsets.shape[0] - 1
    kids = min(width, vocab)
    expanded: list[TensorSpec] = [((nodes,), torch.float32), ((nodes,), torch.int64), ((nodes,), torch.int32)]
    children: list[TensorSpec] = [
        ((nodes, kids), torch.int64), ((nodes, kids), torch.float32), ((trees, growth.keep), torch.int32),
    ]  # fmt: skip
    workspace = total_bytes(expand_scratch(logits, width=kids))
    return [*expanded, *children, ((trees + 1,), torch.int32), ((workspace,), torch.uint8)]


@declare_scratch(_scratch)
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
    out: Any = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, TreePlan]:
    """Runs the operator without reading anything back from the device."""
    from .triton_kernel import enter, front, pack

    op, dist = "tree_grow", (inv_t, cut, tie_id)
    check(logits, *dist, offsets, growth, level, width, sharpness, seeds, positions)
    (trees, columns), keep, kids = growth.tokens.shape, growth.keep, min(width, logits.shape[1])
    (nodes, _), reach, device = logits.shape, min(width, keep), logits.device
    most = 1 + (keep if last else (level + 1) * reach)
    packed: list[TensorSpec] = [((trees * most,), torch.int64), ((trees * most,), torch.int32)]
    specs = [*packed, ((2, trees), torch.int32), *plan_specs(trees * most, most)]
    tokens, parents, counts, *plan = result_tensors(op, out, specs, device)
    sizes = _scratch(logits, *dist, offsets, growth, width=width)
    scratch, _ = carve_workspace(op, workspace, sizes, device)
    node_scores, node_seeds, node_positions, children, child_scores, best, bounds, expand_workspace = scratch
    if level == 0:
        reset(growth)
    offsets = offsets.contiguous()
    keys, noise = (offsets, offsets), dict[str, Tensor]()
    if seeds is not None and positions is not None:
        keys = seeds.contiguous(), positions.contiguous()
        noise = {"seeds": node_seeds.zero_(), "positions": node_positions.fill_(-1)}
    node_scores.fill_(-torch.inf)  # nodes outside all trees get no children
    if trees:
        front[(trees,)](
            offsets, growth.scores, *keys, node_scores, node_seeds, node_positions, nodes, columns, keep, level,
            NOISE=bool(noise), BLOCK=64, num_warps=1,
        )  # fmt: skip
    tree_expand(
        logits, *dist, offsets, node_scores, width=kids, keep=keep, sharpness=sharpness, **noise,
        out=(children, child_scores, best), workspace=expand_workspace,
    )  # fmt: skip
    tokens.zero_()
    parents.fill_(-1)
    table = growth.tokens, growth.scores, growth.parents, growth.nodes
    column_lanes = lanes_for(columns)
    if trees:
        enter[(trees,)](
            offsets, children, child_scores, best, growth.limits.contiguous(), *table, counts, nodes, columns, keep,
            level, kids, reach, LAST=last, KEEP=lanes_for(keep), COLUMNS=column_lanes, num_warps=8,
        )  # fmt: skip
        pack[(trees,)](
            growth.tokens, growth.parents, growth.nodes, counts, tokens, parents, bounds, trees, columns, keep, most,
            COLUMNS=column_lanes, TREES=lanes_for(trees), num_warps=4,
        )  # fmt: skip
    else:
        bounds.zero_()
    return tokens, parents, counts, tree_plan(parents, bounds, most, out=plan)


def _enter_variant(last: bool) -> Variant:
    int32 = "offsets_ptr", "best_ptr", "limits_ptr", "parents_ptr", "nodes_ptr", "counts_ptr"
    numbers = "num_expanded", "num_columns", "keep", "level", "width", "reach"
    return Variant(
        f"tree_grow/enter{' last' if last else ''}", "tree_grow.triton_kernel:enter",
        {
            **dict.fromkeys(int32, "*i32"), **dict.fromkeys(("children_ptr", "tokens_ptr"), "*i64"),
            **dict.fromkeys(("child_scores_ptr", "scores_ptr"), "*fp32"), **dict.fromkeys(numbers, "i32"),
        },
        {"LAST": last, "KEEP": 256, "COLUMNS": 256}, 8, everyday=("sm_90",) if last else (),
    )  # fmt: skip


VARIANTS = [
    Variant(
        "tree_grow/front", "tree_grow.triton_kernel:front",
        {
            **dict.fromkeys(("offsets_ptr", "positions_ptr", "expanded_positions_ptr"), "*i32"),
            **dict.fromkeys(("scores_ptr", "expanded_scores_ptr"), "*fp32"),
            **dict.fromkeys(("seeds_ptr", "expanded_seeds_ptr"), "*i64"),
            **dict.fromkeys(("num_expanded", "num_columns", "keep", "level"), "i32"),
        },
        {"NOISE": True, "BLOCK": 64}, 1,
    ),
    _enter_variant(False),
    _enter_variant(True),
    Variant(
        "tree_grow/pack", "tree_grow.triton_kernel:pack",
        {
            **dict.fromkeys(("tokens_ptr", "packed_tokens_ptr"), "*i64"),
            **dict.fromkeys(("parents_ptr", "nodes_ptr", "counts_ptr", "packed_parents_ptr", "bounds_ptr"), "*i32"),
            **dict.fromkeys(("num_trees", "num_columns", "keep", "most"), "i32"),
        },
        {"COLUMNS": 256, "TREES": 32},
    ),
]  # fmt: skip
