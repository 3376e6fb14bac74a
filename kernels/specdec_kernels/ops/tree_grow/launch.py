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
from .reference import Growth, begin, check


def _scratch(
    logits: Tensor, inv_t: Tensor, cut: Tensor, tie_id: Tensor, offsets: Tensor, growth: Growth, *, width: int,
    **kwargs: Any,
) -> list[TensorSpec]:  # fmt: skip
    """Per node that grows: score, seed, position, children and their scores; per tree: the best of these and its end;
    what tree_expand needs."""
    (nodes, vocab), trees, single, integer = logits.shape, offsets.shape[0] - 1, torch.float32, torch.int32
    kids, wide = min(width, vocab), torch.int64
    own: list[TensorSpec] = [((nodes,), single), ((nodes,), wide), ((nodes,), integer)]
    found: list[TensorSpec] = [((nodes, kids), wide), ((nodes, kids), single), ((trees, growth.keep), integer)]
    return [*own, *found, ((trees + 1,), integer), ((total_bytes(expand_scratch(logits, width=kids)),), torch.uint8)]


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
    """The operator; waits for nothing."""
    from .triton_kernel import enter, front, pack

    op, dist = "tree_grow", (inv_t, cut, tie_id)
    check(logits, *dist, offsets, growth, level, width, sharpness, seeds, positions)
    (trees, columns), keep, kids = growth.tokens.shape, growth.keep, min(width, logits.shape[1])
    (nodes, _), reach, device = logits.shape, min(width, keep), logits.device
    most = 1 + (keep if last else (level + 1) * reach)
    chain_layout: list[TensorSpec] = [((trees * most,), torch.int64), ((trees * most,), torch.int32)]
    specs = [*chain_layout, ((2, trees), torch.int32), *plan_specs(trees * most, most)]
    packed, links, counts, *plan = result_tensors(op, out, specs, device)
    sizes = _scratch(logits, *dist, offsets, growth, width=width)
    (own, node_seeds, node_positions, children, found, best, bounds, memory), _ = carve_workspace(
        op, workspace, sizes, device
    )
    if level == 0:
        begin(growth)
    offsets = offsets.contiguous()
    keys, noise = (offsets, offsets), dict[str, Tensor]()
    if seeds is not None and positions is not None:
        keys = seeds.contiguous(), positions.contiguous()
        noise = {"seeds": node_seeds.zero_(), "positions": node_positions.fill_(-1)}
    own.fill_(-torch.inf)  # nodes of no tree grow nothing
    if trees:
        front[(trees,)](
            offsets, growth.scores, *keys, own, node_seeds, node_positions, nodes, columns, keep, level,
            NOISE=bool(noise), BLOCK=64, num_warps=1,
        )  # fmt: skip
    tree_expand(
        logits, *dist, offsets, own, width=kids, keep=keep, sharpness=sharpness, **noise, out=(children, found, best),
        workspace=memory,
    )  # fmt: skip
    packed.zero_()
    links.fill_(-1)
    table = growth.tokens, growth.scores, growth.parents, growth.nodes
    room = lanes_for(columns)
    if trees:
        enter[(trees,)](
            offsets, children, found, best, growth.limits.contiguous(), *table, counts, nodes, columns, keep, level,
            kids, reach, LAST=last, KEEP=lanes_for(keep), COLUMNS=room, num_warps=8,
        )  # fmt: skip
        pack[(trees,)](
            growth.tokens, growth.parents, growth.nodes, counts, packed, links, bounds, trees, columns, keep, most,
            COLUMNS=room, TREES=lanes_for(trees), num_warps=4,
        )  # fmt: skip
    else:
        bounds.zero_()
    return packed, links, counts, tree_plan(links, bounds, most, out=plan)


def _entering(last: bool) -> Variant:
    integers = ("offsets", "best", "limits", "parents", "nodes", "counts")
    return Variant(
        f"tree_grow/enter{' last' if last else ''}", "tree_grow.triton_kernel:enter",
        {
            **dict.fromkeys(integers, "*i32"), **dict.fromkeys(("children", "tokens"), "*i64"),
            **dict.fromkeys(("found", "scores"), "*fp32"),
            **dict.fromkeys(("growing", "columns", "keep", "level", "width", "reach"), "i32"),
        },
        {"LAST": last, "KEEP": 256, "COLUMNS": 256}, 8, everyday=("sm_90",) if last else (),
    )  # fmt: skip


VARIANTS = [
    Variant(
        "tree_grow/front", "tree_grow.triton_kernel:front",
        {
            **dict.fromkeys(("offsets", "positions", "node_positions"), "*i32"),
            **dict.fromkeys(("scores", "own"), "*fp32"), **dict.fromkeys(("seeds", "node_seeds"), "*i64"),
            **dict.fromkeys(("count", "columns", "keep", "level"), "i32"),
        },
        {"NOISE": True, "BLOCK": 64}, 1,
    ),
    _entering(False),
    _entering(True),
    Variant(
        "tree_grow/pack", "tree_grow.triton_kernel:pack",
        {
            "tokens": "*i64", **dict.fromkeys(("parents", "nodes", "counts", "links", "bounds"), "*i32"),
            "packed": "*i64",
            **dict.fromkeys(("trees", "columns", "keep", "most"), "i32"),
        },
        {"COLUMNS": 256, "TREES": 32},
    ),
]  # fmt: skip
