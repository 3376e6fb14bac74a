"""Plain PyTorch definition of tree_plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import argument_checks
from .plan import TreePlan


def check_arguments(parents: Tensor, offsets: Tensor) -> None:
    """Raises ValueError for arguments that tree_plan cannot take."""
    op = "tree_plan"
    nodes = argument_checks.check_tensor(op, "parents", parents, torch.int32, "M").shape[0]
    argument_checks.check_offsets(op, offsets, nodes)
    bounds, parent_of = offsets.tolist(), parents.tolist()
    for row in range(len(bounds) - 1):
        for node in range(bounds[row + 1] - bounds[row]):
            parent = parent_of[bounds[row] + node]
            if node == 0 and parent != -1:
                raise ValueError(
                    f"{op}: row {row}, node 0 has parent {parent}; expected -1; the first node of a row is its root"
                )
            if node > 0 and not 0 <= parent < node:
                raise ValueError(
                    f"{op}: row {row}, node {node} has parent {parent}; expected an index within the row from 0 to "
                    f"{node - 1}; order the nodes so that every parent precedes its children"
                )


def tree_plan(parents: Tensor, offsets: Tensor, max_nodes: int | None = None) -> TreePlan:
    """Computes depths, ancestor words and child links of packed trees, one tree per request.

    Args:
        parents: Index of each node's parent within its tree, int32 [M]; -1 for the root. Parents precede children.
        offsets: First node of each request, int32 [B + 1]. Empty trees are allowed. Nodes from offsets[B] on are the
            tail and belong to no request.
        max_nodes: Upper bound on the nodes of a tree, if the host knows one. It fixes the number of ancestor words.
            With None there are as few words as the data needs; a GPU kernel, which reads nothing back, makes words for
            M nodes.

    Returns:
        The `TreePlan`.

    Raises:
        ValueError: If a shape or dtype is wrong, offsets decrease, a root is not first, or a parent does not precede
            its child. The message names row and node.

    Source:
        SpecInfer (Miao et al. 2024), section 4: topology-aware causal mask.
    """
    check_arguments(parents, offsets)
    bounds, parent_of = offsets.tolist(), parents.tolist()
    nodes = len(parent_of)
    widest = max((end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)), default=0)
    words = max(1, (widest + 31) // 32)
    depth, row_of = [0] * nodes, [-1] * nodes
    first_child, next_sibling = [-1] * nodes, [-1] * nodes
    ancestors = [0] * nodes  # Python integers: bit j is node j of the tree
    for row, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        latest: dict[int, int] = {}  # parent -> its latest child so far
        for node in range(start, end):
            row_of[node] = row
            ancestors[node] = 1 << (node - start)
            if node == start:
                continue
            parent = start + parent_of[node]
            depth[node] = depth[parent] + 1
            ancestors[node] |= ancestors[parent]
            if parent in latest:
                next_sibling[latest[parent]] = node
            else:
                first_child[parent] = node
            latest[parent] = node
    table = [[(bits >> (32 * word)) & 0xFFFFFFFF for word in range(words)] for bits in ancestors]

    def to_int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=parents.device)

    packed = torch.tensor(table, dtype=torch.int64).reshape(nodes, words)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    plan = TreePlan(
        depth=to_int32(depth),
        row=to_int32(row_of),
        ancestors=packed.to(device=parents.device, dtype=torch.int32),
        first_child=to_int32(first_child),
        next_sibling=to_int32(next_sibling),
    )
    return plan if max_nodes is None else plan.widened(max_nodes)
