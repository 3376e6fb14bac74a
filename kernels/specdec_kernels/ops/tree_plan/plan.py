"""TreePlan: the links of a packed batch of token trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

MOST_NODES = 2048
"""Nodes of a row that the GPU kernel serves: more ancestor words would not fit in registers."""

MOST_ROWS = 32767
"""Rows of a batch that it serves: a program compares its nodes with all their ends, and a block holds 2^20 numbers."""


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Derived structure of M packed nodes; all tensors int32 on the device of the parents.

    depth: [M], 0 at roots and tail nodes.
    row: [M], request of each node, -1 for tail nodes.
    ancestors: [M, W] words; bit j % 32 of word j // 32 is set iff node j of the same row is an ancestor or the node
        itself. W = ceil(largest row / 32), at least 1. Tail nodes have none.
    first_child, next_sibling: [M], packed indices in index order, -1 for none.
    """

    depth: Tensor
    row: Tensor
    ancestors: Tensor
    first_child: Tensor
    next_sibling: Tensor

    def widened(self, max_nodes: int) -> TreePlan:
        """The plan with ancestor words for rows of so many nodes. Raises: ValueError if a row has more."""
        words, missing = self.ancestors.shape[1], -(-max_nodes // 32) - self.ancestors.shape[1]
        if missing < 0 and words > 1:
            raise ValueError(
                f"tree_plan: max_nodes is {max_nodes}; expected at least the largest row, {32 * words - 31} or more"
            )
        return replace(self, ancestors=pad(self.ancestors, (0, missing))) if missing > 0 else self
