"""TreePlan: depths, ancestor words and links of a packed batch of token trees.

This plan is the structure of the trees. How one attention pass splits its work is `tree_attention.plan.AttentionPlan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

MOST_NODES = 2048
"""Largest tree that the GPU kernel serves: more ancestor words do not fit in registers."""

MOST_ROWS = 32767
"""Most requests that it serves: a program compares its nodes with all their ends, and a tile holds 2^20 elements."""


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Links of M packed nodes, all int32 on the device of the parents.

    Attributes:
        depth: Depth of each node, [M]; 0 at roots and at tail nodes.
        row: Request of each node, [M]; -1 for tail nodes.
        ancestors: Ancestor words, [M, W]. Bit j % 32 of word j // 32 is set if node j of the same request is an
            ancestor of the node or the node itself. W is ceil(nodes of the largest tree / 32), at least 1. Tail nodes
            have no bit.
        first_child: Packed index of the first child, [M]; -1 for none.
        next_sibling: Packed index of the next sibling in index order, [M]; -1 for none.
    """

    depth: Tensor
    row: Tensor
    ancestors: Tensor
    first_child: Tensor
    next_sibling: Tensor

    def widened(self, max_nodes: int) -> TreePlan:
        """Returns the plan with ancestor words for trees of `max_nodes` nodes.

        Raises:
            ValueError: If a tree has more nodes.
        """
        words, missing = self.ancestors.shape[1], -(-max_nodes // 32) - self.ancestors.shape[1]
        if missing < 0 and words > 1:
            raise ValueError(
                f"tree_plan: max_nodes is {max_nodes}; expected at least the nodes of the largest tree, "
                f"{32 * words - 31} or more"
            )
        return replace(self, ancestors=pad(self.ancestors, (0, missing))) if missing > 0 else self
