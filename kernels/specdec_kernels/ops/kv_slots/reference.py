"""Plain PyTorch definition of kv_slots."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_slots(
    page_table: Tensor,
    lengths: Tensor,
    rows: Tensor,
    offsets: Tensor,
    depth: Tensor | None,
    nodes: int,
    page_size: int,
    advance: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assigns slots and positions to the nodes of B requests: node i of request b gets slot `lengths[rows[b]] + i`.

    Args:
        page_table: Pages of every row of the cache, int32 [R, P].
        lengths: Committed tokens of every row, int32 [R].
        rows: Rows of the cache that this batch uses, int32 [B].
        offsets: First node of each request, int32 [B + 1].
        depth: Depth of every node, int32 [M]; None for causal chains, whose depth is the index within the request.
        nodes: M, at least offsets[B].
        page_size: Slots of a page.
        advance: Whether to commit the nodes in place: lengths[row] grows by the nodes of its request.

    Returns:
        The page tables of the batch, int32 [B, P]; their lengths, int32 [B]; flat slots page * page_size + offset,
        int64 [M]; and positions, int64 [M]. Nodes from offsets[B] on get slot -1, the trash, and position 0.

    Raises:
        ValueError: If row ids, offsets or lengths do not fit.
    """
    batch = rows.shape[0]
    index = rows.long()
    if bool(((index < 0) | (index >= page_table.shape[0])).any()):
        raise ValueError(f"kv_slots: got rows {rows.tolist()}; expected row ids below {page_table.shape[0]}")
    counts = offsets[1:] - offsets[:-1]
    table, committed = page_table[index], lengths[index]
    capacity = page_table.shape[1] * page_size
    overfull = (counts > 0) & ((committed < 0) | (committed + counts > capacity))
    if int(offsets[0]) or bool((counts < 0).any()) or int(offsets[-1]) > nodes or bool(overfull.any()):
        raise ValueError(
            f"kv_slots: got offsets {offsets.tolist()} behind {committed.tolist()} committed tokens; expected "
            f"non-decreasing offsets from 0 up to {nodes} and 0 to {capacity} tokens a row"
        )
    if advance:
        lengths[index] = committed + counts
    node = torch.arange(nodes, dtype=torch.int32, device=rows.device)
    if batch == 0:
        trash = torch.full((nodes,), -1, dtype=torch.int64, device=rows.device)
        return table, committed, trash, torch.zeros_like(trash)
    row_of = torch.bucketize(node, offsets[1:], right=True)
    valid = row_of < batch
    row_of = row_of.clamp(max=batch - 1)
    at = torch.where(valid, committed[row_of] + node - offsets[:-1][row_of], 0)
    slots = table[row_of, (at // page_size).long()].long() * page_size + at % page_size
    positions = at if depth is None else committed[row_of] + depth
    return table, committed, torch.where(valid, slots, -1), torch.where(valid, positions, 0).long()
