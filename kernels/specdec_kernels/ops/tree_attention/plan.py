"""AttentionPlan: equal shares of the tiles of one pass of tree attention, computed once for all layers.

This plan splits the work of an attention pass. The structure of the token trees is `tree_plan.plan.TreePlan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Shares of the tiles of one pass.

    Integers follow from shapes, tensors (int32) from lengths on the device. A block is block_m query rows of one
    request, where a query row is a node and one of the heads that share a key/value head. A tile is block_n keys.

    Attributes:
        starts: Tiles before each block, per key/value head, [blocks + 1].
        rows: Request of each block, [blocks].
        firsts: Block in which each share begins, [programs].
        block_m: Query rows of a block.
        block_n: Keys of a tile.
        programs: Number of shares.
        kv_heads: Key/value heads of the calls.
        group: Query heads per key/value head.
        causal: Whether the calls have no ancestors.
        window: Their sliding window.
    """

    starts: Tensor
    rows: Tensor
    firsts: Tensor
    block_m: int
    block_n: int
    programs: int
    kv_heads: int
    group: int
    causal: bool
    window: int


def count_blocks(nodes: int, batch: int, group: int, block_m: int) -> int:
    """Returns the blocks that a packed batch of these shapes may need; some stay empty."""
    return nodes * group // block_m + batch + 1


def split_plan_tensors(
    out: Tensor | None, device: torch.device, blocks: int, programs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns starts, rows and firsts in one tensor. Raises ValueError if the size of `out` differs."""
    size = 2 * blocks + 1 + programs
    whole = torch.empty(size, dtype=torch.int32, device=device) if out is None else out
    if whole.dtype != torch.int32 or whole.shape != (size,) or not whole.is_contiguous() or whole.device != device:
        raise ValueError(
            f"attention_plan: out is {whole.dtype} {list(whole.shape)}, expected contiguous int32 [{size}] on {device}"
        )
    starts, rows, firsts = whole.split([blocks + 1, blocks, programs])
    return starts, rows, firsts


def check_plan_arguments(
    lengths: Tensor, offsets: Tensor, nodes: int, group: int, block_m: int, block_n: int, programs: int
) -> None:
    """Raises ValueError for arguments that attention_plan cannot take. Reads no data."""
    fits = all(each.dtype == torch.int32 and each.ndim == 1 and each.is_contiguous() for each in (lengths, offsets))
    if not fits or offsets.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"attention_plan: lengths are {lengths.dtype} {list(lengths.shape)} and offsets {offsets.dtype} "
            f"{list(offsets.shape)}; expected contiguous int32 [B] and [B + 1]"
        )
    if nodes < 0 or min(group, block_m, block_n, programs) < 1:
        raise ValueError(
            f"attention_plan: nodes {nodes}, group {group}, block_m {block_m}, block_n {block_n}, programs {programs}; "
            "expected nodes of at least 0 and others of at least 1"
        )


MIN_SHARE_TILES = 2
"""Least tiles of a share, if there are so many."""
MAX_TILES = 2**30
"""Most tiles of a pass, because they are numbered in 32 bits."""


def max_tiles_per_block(blocks: int, kv_heads: int) -> int:
    """Returns the most tiles of a block and a key/value head that a plan can number."""
    return MAX_TILES // max(1, blocks * kv_heads)


def tiles_per_share(total: int, kv_heads: int, programs: int) -> int:
    """Returns the tiles of a share."""
    return max(-(-total * kv_heads // programs), MIN_SHARE_TILES)


def attention_plan(
    lengths: Tensor,
    offsets: Tensor,
    nodes: int,
    *,
    kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    programs: int,
    causal: bool = False,
    window: int = 0,
    out: Tensor | None = None,
) -> AttentionPlan:
    """Divides the tiles that one pass of tree attention reads into equal shares, whatever the lengths of its requests.

    A plan serves all layers with these numbers. `plan_for` chooses them, and `tree_attention(..., plan=)` takes it. It
    numbers up to 2^30 tiles, over all blocks and key/value heads.

    Args:
        lengths: Committed tokens of each request, int32 [B].
        offsets: First node of each request, int32 [B + 1].
        nodes: Nodes of the batch, M.
        kv_heads: Key/value heads.
        group: Query heads per key/value head.
        block_m: Query rows of a block.
        block_n: Keys of a tile.
        programs: Number of shares.
        causal: Whether the calls have no ancestors.
        window: Sliding window, 0 for none.
        out: Memory of the plan, int32 [2 * (M * group // block_m + B + 1) + 1 + programs].

    Returns:
        The plan.

    Raises:
        ValueError: If shapes, dtypes or numbers do not fit.
    """
    check_plan_arguments(lengths, offsets, nodes, group, block_m, block_n, programs)
    batch = lengths.shape[0]
    blocks = count_blocks(nodes, batch, group, block_m)
    starts, rows, firsts = split_plan_tensors(out, lengths.device, blocks, programs)
    bounds = [*offsets.tolist(), nodes]
    begins = [bounds[row] * group // block_m + row for row in range(batch + 1)]
    total, tiles_before, own_rows = 0, [], []
    for block in range(blocks):
        row = max(each for each in range(batch + 1) if begins[each] <= block)
        tiles_before.append(total)
        own_rows.append(row)
        own, count = block - begins[row], bounds[row + 1] - bounds[row]
        if row == batch or own * block_m >= count * group:
            continue
        length = int(lengths[row])
        last = min((own * block_m + block_m - 1) // group, count - 1)
        nearest = length + (own * block_m // group if causal else 0)
        begin = max(nearest - window + 1, 0) // block_n if window else 0
        total += max(min(-(-(length + last + 1) // block_n), max_tiles_per_block(blocks, kv_heads)) - begin, 0)
    tiles_before.append(total)
    share = tiles_per_share(total, kv_heads, programs)
    wanted = [program * share // kv_heads for program in range(programs)]
    found = [max(b for b in range(blocks) if tiles_before[b] <= tile) for tile in wanted]
    for tensor, values in ((starts, tiles_before), (rows, own_rows), (firsts, found)):
        tensor.copy_(torch.tensor(values, dtype=torch.int32))
    return AttentionPlan(starts, rows, firsts, block_m, block_n, programs, kv_heads, group, causal, window)
