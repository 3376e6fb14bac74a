"""Packed trees as recurrent layers see them, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def check_tree(
    op: str, nodes: int, capacity: int, rows: Tensor, lengths: Tensor, offsets: Tensor, parents: Tensor | None
) -> None:
    """Checks the arguments that describe packed trees.

    Args:
        op: Name of the operator, for messages.
        nodes: M.
        capacity: R, the rows of the state.
        rows: int32 [B].
        lengths: int32 [B].
        offsets: int32 [B + 1].
        parents: int32 [M or more], or None.

    Raises:
        ValueError: For another dtype, or for shapes that do not fit.
    """
    batch = rows.shape[0] if rows.dim() == 1 else -1
    for name, each, size in (("rows", rows, batch), ("lengths", lengths, batch), ("offsets", offsets, batch + 1)):
        if each.dtype != torch.int32 or each.dim() != 1 or each.shape[0] != size:
            raise ValueError(f"{op}: {name} is {each.dtype} {list(each.shape)}; expected int32 [{max(size, 0)}]")
    if parents is not None and (parents.dtype != torch.int32 or parents.dim() != 1 or parents.shape[0] < nodes):
        raise ValueError(f"{op}: parents is {parents.dtype} {list(parents.shape)}; expected int32 [{nodes}] or None")
    if batch and not (int(rows.min()) >= 0 and int(rows.max()) < capacity):
        raise ValueError(f"{op}: got rows {rows.tolist()}; expected row ids below {capacity}")
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] > nodes or any(end < start for start, end in zip(ends, ends[1:])):
        raise ValueError(f"{op}: got offsets {ends}; expected non-decreasing offsets from 0 up to {nodes}")


def walk_nodes(op: str, offsets: Tensor, parents: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Walks through packed nodes, parents before children.

    Args:
        op: Name of the operator, for messages.
        offsets: First node of each request, int32 [B + 1].
        parents: Parent of each node by its index in its tree, -1 at roots; None for chains.

    Yields:
        (request, node, parent), the last two as packed indices; the parent is -1 at roots.

    Raises:
        ValueError: If a parent does not precede its node.
    """
    ends = offsets.tolist()
    known = None if parents is None else parents.tolist()
    for request, (start, end) in enumerate(zip(ends, ends[1:])):
        for node in range(start, end):
            own = node - start - 1 if known is None else known[node]
            if not -1 <= own < node - start:
                raise ValueError(f"{op}: the parent of node {node} is {own}; expected -1 to {node - start - 1}")
            yield request, node, start + own if own >= 0 else -1


def check_advance(op: str, parents: Tensor | None, advance: bool) -> None:
    """Raises ValueError if the nodes of trees are to be committed at once."""
    if advance and parents is not None:
        raise ValueError(f"{op}: got advance and parents; expected chains; commit the path of a tree afterwards")
