"""Triton backend of tree_plan: argument checks, the launch and its variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dispatch.workspace import TensorSpec, result_tensors
from ...triton_shared.aot_config import Variant
from ...triton_shared.jit import lanes_for
from .plan import MOST_NODES, MOST_ROWS, TreePlan

MOST_LANES = 128
"""Requests that a program compares its nodes with at once. Compilers need minutes for tiles of some thousand lanes."""


def nodes_per_program(words: int) -> int:
    """Returns the packed nodes of a program: a square of them fits, and many ancestor words mean fewer nodes."""
    return max(16, min(32, 2048 // lanes_for(words, 4)))


def why_not(parents: Tensor, offsets: Tensor, max_nodes: int | None = None) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    most, rows = parents.shape[0] if max_nodes is None else max_nodes, offsets.shape[0] - 1
    if rows > MOST_ROWS:
        return f"{rows} requests; expected at most {MOST_ROWS}"
    return None if most <= MOST_NODES else f"trees of up to {most} nodes; expected at most {MOST_NODES}; pass max_nodes"


def plan_specs(nodes: int, most: int) -> list[TensorSpec]:
    """Returns the specs of a `TreePlan` of `nodes` nodes for trees of at most `most` nodes."""
    shapes = ((nodes,), (nodes,), (nodes, max(1, -(-most // 32))), (nodes,), (nodes,))
    return [(shape, torch.int32) for shape in shapes]


def tree_plan(parents: Tensor, offsets: Tensor, max_nodes: int | None = None, *, out: Any = None) -> TreePlan:
    """Runs the operator in one launch. Data is not checked; a parent that does not precede its child counts as none."""
    from .triton_kernel import plan_trees

    for name, given in (("parents", parents), ("offsets", offsets)):
        if given.dtype != torch.int32 or given.ndim != 1 or not given.is_contiguous():
            raise ValueError(f"tree_plan: {name} is {given.dtype} {list(given.shape)}; expected contiguous flat int32")
    if offsets.shape[0] < 1:
        raise ValueError("tree_plan: offsets is empty; expected B + 1 entries; an empty batch has offsets [0]")
    nodes, batch = parents.shape[0], offsets.shape[0] - 1
    made = result_tensors(
        "tree_plan", out, plan_specs(nodes, nodes if max_nodes is None else max_nodes), parents.device
    )
    words = made[2].shape[1]
    size = nodes_per_program(words)
    if nodes:
        plan_trees[(-(-nodes // size),)](
            parents, offsets, *made, nodes, batch,
            words,
            BLOCK_W=lanes_for(words, 4), BLOCK=size, BLOCK_B=min(lanes_for(batch), MOST_LANES),
        )  # fmt: skip
    return TreePlan(*made)


def _variant(words: int, everyday: tuple[str, ...]) -> Variant:
    names = "parents", "offsets", "depth", "row", "ancestors", "first_child", "next_sibling"
    pointers = dict.fromkeys((f"{name}_ptr" for name in names), "*i32")
    return Variant(
        f"tree_plan/{32 * words} nodes",
        "tree_plan.triton_kernel:plan_trees",
        {**pointers, "num_nodes": "i32", "num_requests": "i32", "num_words": "i32"},
        {"BLOCK_W": lanes_for(words, 4), "BLOCK": nodes_per_program(words), "BLOCK_B": 32},
        stages=1,
        everyday=everyday,
    )


VARIANTS = [_variant(2, ("sm_90",)), _variant(32, ())]
