"""TreePlan: the links of a packed batch of token trees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
