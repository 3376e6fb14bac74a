"""Trees as dense masks: which node sees which. They run on any device.

Tests: tests/embedding/test_conversions.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.embedding.node_order import Parents, ancestors, as_parents, check_tree


def mask_from_parents(parents: Parents, *, unused: bool = False) -> Tensor:
    """Returns the attention mask of trees: every node sees its ancestors and itself.

    Args:
        parents: Parent of each node, -1 for the root: integers [n] or [B, n], in any order.
        unused: Whether other nodes than node 0 may have no parent. They see themselves alone.

    Returns:
        bool [n, n] or [B, n, n]; row i is what node i sees.

    Raises:
        ValueError: For an orphan, a cycle or a parent that does not exist.
    """
    found = as_parents(parents)
    check_tree(found, unused)
    return ancestors(found)


def parents_from_mask(mask: Tensor, *, unused: bool = False) -> Tensor:
    """Returns the parents of trees from their masks. The parent of a node is the deepest of those that it sees.

    Args:
        mask: bool [n, n] or [B, n, n], without the columns of the prefix.
        unused: Whether nodes other than node 0 may see nothing else. They get parent -1.

    Returns:
        Parent of each node, int64 [n] or [B, n]. The order of the nodes stays; `parent_first` changes it.

    Raises:
        ValueError: If the mask is not bool or not square, or is not that of a tree. Values on a GPU are not read.
    """
    if mask.dtype != torch.bool or mask.dim() not in (2, 3) or mask.shape[-1] != mask.shape[-2] or not mask.shape[-1]:
        raise ValueError(
            f"mask: got {mask.dtype} {list(mask.shape)}; expected bool [n, n] or [B, n, n]; slice off the columns of "
            "the prefix, and compare an additive mask with 0 (mask == 0)"
        )
    nodes = mask.shape[-1]
    own = torch.eye(nodes, dtype=torch.bool, device=mask.device)
    depth = mask.sum(-1)
    seen = torch.where(mask & ~own, depth[..., None, :], 0)
    found = torch.where(seen.any(-1), seen.argmax(-1), -1)
    if mask.is_cpu:
        _check_mask(mask, found)
    check_tree(found, unused)
    return found


def _check_mask(mask: Tensor, parents: Tensor) -> None:
    """Raises ValueError for a mask that is not that of its own parents."""
    expected = ancestors(parents)
    wrong = (mask != expected).reshape(-1, *mask.shape[-2:]).nonzero()
    if len(wrong):
        tree, node, other = wrong[0].tolist()
        where = f"tree {tree}, " if mask.dim() == 3 else ""
        seen = bool(mask.reshape(-1, *mask.shape[-2:])[tree, node, other])
        got = f"node {node}: got that it {'sees' if seen else 'does not see'} node {other}"
        raise ValueError(
            f"mask: {where}{got}; expected every node to see itself, its parent and all that its parent sees, and "
            "nothing else"
        )
