"""Packed trees as recurrent layers see them, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def check_tree_shapes(
    op: str, nodes: int, rows: Tensor, lengths: Tensor, offsets: Tensor, parents: Tensor | None
) -> None:
    """Checks the arguments that describe packed trees, but no number in them.

    Args:
        op: Name of the operator, for messages.
        nodes: M.
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


def check_tree(
    op: str, nodes: int, capacity: int, rows: Tensor, lengths: Tensor, offsets: Tensor, parents: Tensor | None
) -> None:
    """Checks the arguments that describe packed trees, except that parents precede their nodes: see `walk_nodes`.

    Args:
        op: Name of the operator, for messages.
        nodes: M.
        capacity: R, the rows of the state.
        rows: int32 [B].
        lengths: int32 [B].
        offsets: int32 [B + 1].
        parents: int32 [M or more], or None.

    Raises:
        ValueError: For another dtype, shapes that do not fit, rows that do not exist, or offsets that decrease.
    """
    check_tree_shapes(op, nodes, rows, lengths, offsets, parents)
    check_rows(op, capacity, rows)
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] > nodes or any(end < start for start, end in zip(ends, ends[1:])):
        raise ValueError(f"{op}: got offsets {ends}; expected non-decreasing offsets from 0 up to {nodes}")


def check_nodes(
    op: str, nodes: int, capacity: int, rows: Tensor, lengths: Tensor, offsets: Tensor, parents: Tensor | None
) -> None:
    """Checks packed trees as `check_tree` does, and also that each parent precedes its node."""
    check_tree(op, nodes, capacity, rows, lengths, offsets, parents)
    for _ in walk_nodes(op, offsets, parents):
        pass


def check_rows(op: str, capacity: int, rows: Tensor) -> None:
    """Raises ValueError unless all rows are below `capacity`."""
    if rows.shape[0] and not (int(rows.min()) >= 0 and int(rows.max()) < capacity):
        raise ValueError(f"{op}: got rows {rows.tolist()}; expected row ids below {capacity}")


def check_path_shapes(op: str, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Raises ValueError unless rows and lengths are int32 [B] and path is int32 [B, D + 1]."""
    if rows.dtype != torch.int32 or lengths.dtype != torch.int32 or lengths.shape != rows.shape or rows.dim() != 1:
        raise ValueError(
            f"{op}: rows is {rows.dtype} {list(rows.shape)} and lengths {lengths.dtype} {list(lengths.shape)}; "
            "expected int32 [B] each"
        )
    if path.dtype != torch.int32 or path.dim() != 2 or path.shape[0] != rows.shape[0]:
        raise ValueError(f"{op}: path is {path.dtype} {list(path.shape)}; expected int32 [{rows.shape[0]}, D + 1]")


def check_path(op: str, capacity: int, nodes: int, rows: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Raises ValueError for shapes, rows and nodes that do not fit."""
    check_path_shapes(op, rows, lengths, path)
    check_rows(op, capacity, rows)
    if path.numel() and not -1 <= int(path.min()) <= int(path.max()) < nodes:
        raise ValueError(f"{op}: got path {path.tolist()}; expected nodes below {nodes}, padded with -1")


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
