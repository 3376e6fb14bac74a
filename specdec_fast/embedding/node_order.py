"""Parents of tree nodes: checks, depths, and an order in which parents precede their children.

All conversions of this package go through parents. A tree of n nodes is an int vector [n] with the parent of each
node; node 0 is the root and has -1. Nodes that a fixed-size layout does not use have -1 too.
Tests: tests/embedding/test_conversions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Parents = Tensor | Sequence[int]
"""Parent of each node, -1 for the root and for unused nodes: a sequence, or an integer tensor [n] or [B, n]."""


def as_parents(parents: Parents) -> Tensor:
    """Returns parents as an int64 tensor.

    Args:
        parents: A sequence, or an integer tensor [n] or [B, n].

    Returns:
        int64 [n] or [B, n].

    Raises:
        ValueError: If the tensor has another number of dimensions or no nodes, or is not of integers.
    """
    found = parents if isinstance(parents, Tensor) else torch.tensor(list(parents), dtype=torch.int64)
    if found.dim() not in (1, 2) or found.shape[-1] == 0 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"parents: got {found.dtype} {list(found.shape)}; expected integers [n] or [B, n] with a root in front"
        )
    return found.long()


def hop(pointers: Tensor, start: Tensor | None = None) -> Tensor:
    """Follows pointers from places. -1 stays -1.

    Args:
        pointers: Next place of each place, int64 [..., n]; -1 at an end.
        start: Places, int64 [..., m]; -1 for none. None: `pointers` themselves, which makes two hops.

    Returns:
        int64 [..., m].
    """
    start = pointers if start is None else start
    return torch.where(start >= 0, pointers.gather(-1, start.clamp(min=0)), -1)


def ancestors(parents: Tensor) -> Tensor:
    """Returns which nodes are ancestors of which, without a read on the host.

    Args:
        parents: int64 [..., n] in any order. On a cycle every node is an ancestor of the others.

    Returns:
        bool [..., n, n]. Row i has the ancestors of node i, and node i itself.
    """
    nodes = parents.shape[-1]
    ids = torch.arange(nodes, device=parents.device)
    reach = ((ids == parents[..., None]) | (ids == ids[:, None])).float()
    for _ in range((nodes - 1).bit_length()):
        reach = ((reach @ reach) > 0).float()
    return reach > 0


def check_tree(parents: Tensor, unused: bool = False) -> None:
    """Checks that parents describe trees, in any order. Values on a GPU are not read.

    Args:
        parents: int64 [n] or [B, n].
        unused: Whether nodes other than node 0 may have no parent.

    Raises:
        ValueError: For a root that has a parent, an orphan, a parent that does not exist, or a cycle.
    """
    if not parents.is_cpu:
        return
    trees = parents.tolist() if parents.dim() == 2 else [parents.tolist()]
    for place, own in enumerate(trees):
        where = f"tree {place}, " if parents.dim() == 2 else ""
        for node, parent in enumerate(own):
            if node == 0 and parent != -1:
                raise ValueError(f"{where}node 0: got parent {parent}; expected -1, since node 0 is the root")
            if not -1 <= parent < len(own):
                raise ValueError(
                    f"{where}node {node}: got parent {parent}; expected a node from 0 to {len(own) - 1}, or -1"
                )
            if node and parent == -1 and not unused:
                raise ValueError(
                    f"{where}node {node}: got an orphan, a node without a parent; expected one root, node 0; drop the "
                    "node, or pass unused=True for layouts of a fixed size"
                )
        known = {0}
        for node in range(1, len(own)):
            trail = []
            at = node
            while at != -1 and at not in known and at not in trail:
                trail.append(at)
                at = own[at]
            if at in trail:
                cycle = trail[trail.index(at) :]
                raise ValueError(
                    f"{where}node {at}: got a cycle of parents, {' -> '.join(map(str, [*cycle, at]))}; expected a path "
                    "to node 0 from every node"
                )
            known.update(trail)


def parent_first(parents: Parents) -> tuple[list[int], list[int]]:
    """Orders the nodes of one tree so that parents precede their children, as `Draft` requires. Reads on the host.

    Siblings keep their order. A tree in order stays as it is.

    Args:
        parents: Parents of the n nodes, in any order. Unused nodes are dropped.

    Returns:
        Parents in the new order, and for each new node its place in the old one: `tokens[order]` are its tokens.

    Raises:
        ValueError: For a root that has a parent, a parent that does not exist, or a cycle.
    """
    found = as_parents(parents)
    if found.dim() != 1:
        raise ValueError(f"parents: got {list(found.shape)}; expected one tree [n]; call it for each tree")
    found = found.cpu()
    check_tree(found, unused=True)
    seen = ancestors(found)
    own, used = found.tolist(), seen[:, 0].tolist()
    if all(used) and all(parent < node for node, parent in enumerate(own)):
        return own, list(range(len(own)))
    depth = seen.sum(1).tolist()
    order = sorted((node for node in range(len(own)) if used[node]), key=lambda node: (depth[node], node))
    place = {node: at for at, node in enumerate(order)}
    return [-1 if node == 0 else place[own[node]] for node in order], order
