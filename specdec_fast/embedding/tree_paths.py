"""Trees as paths from the root to the leaves (`retrieve_indices` of EAGLE and Medusa), and as Medusa's choices.

Trees of this form are fixed or small, so these functions read on the host. Tests: tests/embedding/test_conversions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_fast.embedding.node_order import Parents, ancestors, as_parents, check_tree

Choice = tuple[int, ...]
"""A node of a Medusa tree: the rank of the token at every depth on the way to it."""


def paths_from_parents(parents: Parents, *, unused: bool = False) -> Tensor:
    """Returns the path to every leaf of one tree, in the order of the leaves.

    Args:
        parents: Parent of each node, -1 for the root: integers [n], in any order.
        unused: Whether other nodes than node 0 may have no parent. No path has them.

    Returns:
        int64 [leaves, depth + 1] on the device of a tensor, else on the CPU: nodes from the root on, padded with -1.

    Raises:
        ValueError: For an orphan, a cycle or a parent that does not exist.
    """
    found = as_parents(parents)
    if found.dim() != 1:
        raise ValueError(f"parents: got {list(found.shape)}; expected one tree [n]; call it for each tree")
    host = found.cpu()
    check_tree(host, unused)
    own, used = host.tolist(), ancestors(host)[:, 0].tolist()
    inner = set(own)
    paths = []
    for leaf in (node for node in range(len(own)) if node not in inner and used[node]):
        path = [leaf]
        while own[path[-1]] >= 0:
            path.append(own[path[-1]])
        paths.append(path[::-1])
    width = max(map(len, paths))
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths], device=found.device)


def parents_from_paths(paths: Tensor | Sequence[Sequence[int]], num_nodes: int | None = None) -> Tensor:
    """Returns the parents of one tree from the paths to its leaves.

    Args:
        paths: Nodes from the root on, [leaves, depth + 1], padded with -1 behind: a tensor, or sequences of any length.
            Paths may repeat, and may end at inner nodes.
        num_nodes: n, the number of nodes. None: the largest node and 1.

    Returns:
        Parent of each node, int64 [n], on the device of a tensor. The order of the nodes stays; `parent_first` changes
        it.

    Raises:
        ValueError: If a path does not begin at node 0 or has a gap, if two paths give a node other parents, or if a
            node is on no path.
    """
    listed = paths.tolist() if isinstance(paths, Tensor) else [list(path) for path in paths]
    trimmed = []
    for place, path in enumerate(listed):
        while path and path[-1] == -1:
            path = path[:-1]
        if not path or path[0] != 0 or min(path) < 0:
            raise ValueError(
                f"paths: path {place}: got {path}; expected node 0, the root, in front, then other nodes, then -1 only"
            )
        trimmed.append(path)
    if not trimmed:
        raise ValueError("paths: got none; expected at least one; a tree of its root alone has the path [0]")
    nodes = max(map(max, trimmed)) + 1 if num_nodes is None else num_nodes
    own = [-1] * nodes
    for place, path in enumerate(trimmed):
        for parent, node in zip(path, path[1:]):
            if not 0 < node < nodes:
                raise ValueError(f"paths: path {place}: got node {node}; expected nodes from 1 to {nodes - 1} below 0")
            if own[node] not in (-1, parent):
                raise ValueError(f"paths: node {node}: got parents {own[node]} and {parent}; expected one parent")
            own[node] = parent
    found = torch.tensor(own, device=paths.device if isinstance(paths, Tensor) else None)
    check_tree(found.cpu())
    return found


def parents_from_choices(choices: Sequence[Choice | Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Returns the tree of Medusa's choices, in Medusa's order: by depth, then by ranks.

    The token of a node at depth d is the one with its rank among the top tokens of head d.

    Args:
        choices: Nodes but the root, in any order; each is the ranks on the way to it, such as `(0, 2)`.

    Returns:
        Parents [n], with the root; the rank of each node, 0 for the root; and the place of each node but the root in
        `choices`.

    Raises:
        ValueError: For an empty choice, a negative rank, a choice that occurs twice, or one whose parent is missing.
    """
    nodes = [tuple(int(rank) for rank in choice) for choice in choices]
    for choice in nodes:
        if not choice or min(choice) < 0:
            raise ValueError(f"choices: got {choice}; expected a tuple of ranks >= 0 for each node but the root")
    order = sorted(range(len(nodes)), key=lambda place: (len(nodes[place]), nodes[place]))
    number: dict[Choice, int] = {(): 0}
    parents, ranks = [-1], [0]
    for place in order:
        choice = nodes[place]
        if choice in number:
            raise ValueError(f"choices: got {choice} twice; expected each node once")
        if choice[:-1] not in number:
            raise ValueError(f"choices: got {choice} without its parent {choice[:-1]}; expected every prefix of it too")
        parents.append(number[choice[:-1]])
        ranks.append(choice[-1])
        number[choice] = len(number)
    return parents, ranks, order


def choices_from_parents(parents: Parents, ranks: Sequence[int] | Tensor | None = None) -> list[Choice]:
    """Returns the Medusa choices of one tree: all nodes but the root, in the order of the tree.

    Args:
        parents: Parent of each node, -1 for the root: integers [n], in any order.
        ranks: Rank of each node, root included. None: its place among its siblings.

    Returns:
        The ranks on the way to each node.

    Raises:
        ValueError: For an orphan, a cycle, a parent that does not exist, or another number of ranks.
    """
    found = as_parents(parents).cpu()
    if found.dim() != 1:
        raise ValueError(f"parents: got {list(found.shape)}; expected one tree [n]; call it for each tree")
    check_tree(found)
    own = found.tolist()
    if ranks is None:
        known = [own[:node].count(parent) for node, parent in enumerate(own)]
    else:
        known = [int(rank) for rank in (ranks.tolist() if isinstance(ranks, Tensor) else ranks)]
    if len(known) != len(own):
        raise ValueError(f"ranks: got {len(known)}; expected {len(own)}, one for each node; the root's is ignored")

    def choice(node: int) -> Choice:
        return () if own[node] < 0 else (*choice(own[node]), known[node])

    return [choice(node) for node in range(1, len(own))]
