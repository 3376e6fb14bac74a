"""Trees as links, in the layout of SGLang: `retrieve_index`, `retrieve_next_token`, `retrieve_next_sibling`.

The second is the first child of a node and the third its next sibling, by their indices in the tree. The first numbers
the nodes of all trees. These functions run on any device, and read nothing on the host but values on a CPU.
Tests: tests/embedding/test_conversions.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_fast.embedding.node_order import Parents, as_parents, check_tree, hop


class TreeLinks(NamedTuple):
    """Links of trees of n nodes each: int64, [n] for one tree or [B, n].

    Attributes:
        node_index: Number of each node among the nodes of all trees, `b * n + i`.
        next_token: First child of each node; -1 for none.
        next_sibling: Next sibling of each node; -1 for none.
    """

    node_index: Tensor
    next_token: Tensor
    next_sibling: Tensor


def links_from_parents(parents: Parents, *, unused: bool = False) -> TreeLinks:
    """Returns the links of trees. Siblings are linked in the order of their indices.

    Args:
        parents: Parent of each node, -1 for the root: integers [n] or [B, n], in any order.
        unused: Whether other nodes than node 0 may have no parent. No link leads to them.

    Returns:
        The links.

    Raises:
        ValueError: For an orphan, a cycle or a parent that does not exist.
    """
    found = as_parents(parents)
    check_tree(found, unused)
    nodes = found.shape[-1]
    ids = torch.arange(nodes, device=found.device)
    later = (found[..., None, :] == found[..., :, None]) & (found[..., None, :] >= 0) & (ids > ids[:, None])
    child = found[..., None, :] == ids[:, None]
    first = [torch.where(table.any(-1), table.int().argmax(-1), -1) for table in (child, later)]
    index = torch.arange(found.numel(), device=found.device).view(found.shape)
    return TreeLinks(index, first[0], first[1])


def parents_from_links(next_token: Tensor, next_sibling: Tensor, *, unused: bool = False) -> Tensor:
    """Returns the parents of trees from their links.

    Args:
        next_token: First child of each node, integers [n] or [B, n]; -1 for none.
        next_sibling: Next sibling of each node, of the same shape; -1 for none.
        unused: Whether nodes that no link leads to are allowed. They get parent -1. SGLang's trees may have some.

    Returns:
        Parent of each node, int64 of the same shape. The order of the nodes stays; `parent_first` changes it.

    Raises:
        ValueError: If two links lead to a node, for a cycle, for a node that no link leads to, or if a link leads out
            of the tree.
    """
    child, sibling = as_parents(next_token), as_parents(next_sibling)
    if child.shape != sibling.shape:
        raise ValueError(
            f"links: got next_token {list(child.shape)} and next_sibling {list(sibling.shape)}; expected equal shapes"
        )
    nodes = child.shape[-1]
    if child.is_cpu:
        _check_links(child, sibling)
    parents, before = _inverse(child), _inverse(sibling)
    ids = torch.arange(nodes, device=child.device).expand_as(child)
    oldest = torch.where(before >= 0, before, ids)  # by pointer jumping, the first sibling of each node
    for _ in range((nodes - 1).bit_length()):
        oldest = hop(oldest)
    found = hop(parents, oldest)
    check_tree(found, unused)
    return found


def _inverse(links: Tensor) -> Tensor:
    """Returns for each node the node whose link leads to it, -1 for none; int64 of the same shape."""
    nodes = links.shape[-1]
    ids = torch.arange(nodes, device=links.device).expand_as(links)
    wide = torch.full((*links.shape[:-1], nodes + 1), -1, dtype=torch.int64, device=links.device)
    return wide.scatter(-1, torch.where(links < 0, nodes, links), ids)[..., :nodes]


def _check_links(child: Tensor, sibling: Tensor) -> None:
    """Raises ValueError for links out of the tree, and for nodes that several links lead to."""
    nodes = child.shape[-1]
    joined = torch.cat([child, sibling], -1)
    outside = (joined < -1) | (joined >= nodes)
    if bool(outside.any()):
        raise ValueError(f"links: got {int(joined[outside][0])}; expected -1, or a node from 0 to {nodes - 1}")
    for own in joined.reshape(-1, 2 * nodes).tolist():
        led = [node for node in own if node >= 0]
        if len(led) != len(set(led)):
            twice = next(node for node in led if led.count(node) > 1)
            raise ValueError(
                f"links: node {twice}: got two links to it; expected one: from its parent if it is the first child, or "
                "from the sibling before it"
            )
