"""Slots and positions of staged nodes in plain PyTorch."""

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
    """Where the nodes of B rows go: node i of row b at slot `lengths[b] + i`, behind what is committed.

    page_table: int32 [R, P] pages of every row of the cache; lengths: int32 [R] committed tokens of every row
    rows: int32 [B] rows of this batch; offsets: int32 [B + 1]; nodes: M, at least offsets[B]
    depth: int32 [M] depth of every node, or None for causal chains (depth = index within the row)
    advance: commit the nodes where they lie: lengths[row] grows by the row's nodes, in place

    Returns: (int32 [B, P] page tables of the batch, int32 [B] lengths, int64 [M] flat slots page * page_size + offset,
    int64 [M] positions). Nodes behind offsets[B] get slot -1 (the trash) and position 0.
    Raises: ValueError for row ids, offsets or lengths that do not fit.
    """
    batch = rows.shape[0]
    index = rows.long()
    if bool(((index < 0) | (index >= page_table.shape[0])).any()):
        raise ValueError(f"kv_slots: got rows {rows.tolist()}; expected row ids below {page_table.shape[0]}")
    counts = offsets[1:] - offsets[:-1]
    table, committed = page_table[index], lengths[index]
    room = page_table.shape[1] * page_size
    crowded = (counts > 0) & ((committed < 0) | (committed + counts > room))
    if int(offsets[0]) or bool((counts < 0).any()) or int(offsets[-1]) > nodes or bool(crowded.any()):
        raise ValueError(
            f"kv_slots: got offsets {offsets.tolist()} behind {committed.tolist()} committed tokens; expected "
            f"non-decreasing offsets from 0 up to {nodes} and 0 to {room} tokens a row"
        )
    if advance:
        lengths[index] = committed + counts
    node = torch.arange(nodes, dtype=torch.int32, device=rows.device)
    if batch == 0:
        nowhere = torch.full((nodes,), -1, dtype=torch.int64, device=rows.device)
        return table, committed, nowhere, torch.zeros_like(nowhere)
    row_of = torch.bucketize(node, offsets[1:], right=True)
    valid = row_of < batch
    row_of = row_of.clamp(max=batch - 1)
    at = torch.where(valid, committed[row_of] + node - offsets[:-1][row_of], 0)
    slots = table[row_of, (at // page_size).long()].long() * page_size + at % page_size
    positions = at if depth is None else committed[row_of] + depth
    return table, committed, torch.where(valid, slots, -1), torch.where(valid, positions, 0).long()
