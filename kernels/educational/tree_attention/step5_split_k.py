"""Step 5: split-K, so that a few long requests fill the GPU.

A decoding step has few programs in step 4: one per 16 nodes and head. Each of them loops over all keys of its request.
Here PIECES programs share that loop. A piece writes the mean of its values and the logarithm of its sum of weights. A
second kernel joins the pieces of a node by the formula of the online softmax, with pieces in place of tiles.

Shapes: as in step 4, and
    part [PIECES, M, H, D] float32, means      part_lse [PIECES, M, H] float32, log of the sums; -inf: no key seen

Run: python kernels/educational/tree_attention/step5_split_k.py (without a GPU in Triton's interpreter)
Tests: tests/interpreter/test_educational.py, tests/kernels/test_educational.py.
Source: Dao et al. 2023, Flash-Decoding for long-context inference.
"""

from __future__ import annotations

import step4_triton
import torch
import triton
import triton.language as tl
import worked_example
from step4_triton import BLOCK_M, BLOCK_N, attend_slots, blocks_of, load_rows
from torch import Tensor

PROCESSORS = 132
"""Multiprocessors of an H100."""
MOST_PIECES = 32


# --8<-- [start:piece]
@triton.jit
def slots_of_piece(piece, keys, PIECES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns first slot and end of a piece. The last pieces may be empty."""
    tiles = tl.cdiv(tl.cdiv(keys, BLOCK_N), PIECES)
    first_slot = piece * tiles * BLOCK_N
    return first_slot, tl.minimum(first_slot + tiles * BLOCK_N, keys)


# --8<-- [end:piece]


@triton.jit
def attend_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, lengths_ptr, offsets_ptr, ancestors_ptr, part_ptr, part_lse_ptr, scale,
    q_node_stride, q_head_stride, k_page_stride, k_slot_stride, k_head_stride, v_page_stride, v_slot_stride,
    v_head_stride, table_stride, num_nodes, words_per_node,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of the request with most nodes, H, B * PIECES)."""
    head, request, piece = tl.program_id(1), tl.program_id(2) // PIECES, tl.program_id(2) % PIECES
    first = tl.load(offsets_ptr + request)
    count = tl.load(offsets_ptr + request + 1) - first
    if tl.program_id(0) * BLOCK_M >= count:
        return
    length = tl.load(lengths_ptr + request)
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_block = index < count
    node = first + index
    query_ptrs = query_ptr + node.to(tl.int64) * q_node_stride + head * q_head_stride
    queries = load_rows(query_ptrs, in_block, WIDTH, BLOCK_D)
    kv_head = (head // GROUP).to(tl.int64)
    first_slot, last_slot = slots_of_piece(piece, length + count, PIECES, BLOCK_N)
    acc, running_max, running_sum = attend_slots(
        queries, node, in_block, key_ptr + kv_head * k_head_stride, value_ptr + kv_head * v_head_stride,
        table_ptr + request.to(tl.int64) * table_stride, ancestors_ptr, length, count, first_slot, last_slot,
        scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride, words_per_node,
        PAGE_SIZE, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    # --8<-- [start:write]
    some = running_sum > 0.0  # a piece of the tree may hold no ancestor of a node
    divisor = tl.where(some, running_sum, 1.0)
    lse = tl.where(some, running_max + tl.log(divisor), float("-inf"))
    row = (piece.to(tl.int64) * num_nodes + node) * HEADS + head
    tl.store(part_lse_ptr + row, lse, mask=in_block)
    dim = tl.arange(0, BLOCK_D)
    part_ptrs = part_ptr + row[:, None] * WIDTH + dim[None, :]
    mask = in_block[:, None] & (dim < WIDTH)[None, :]
    tl.store(part_ptrs, acc / divisor[:, None], mask=mask)
    # --8<-- [end:write]


# --8<-- [start:combine]
@triton.jit
def combine_kernel(
    part_ptr, part_lse_ptr, offsets_ptr, out_ptr,
    num_requests, num_nodes, o_node_stride, o_head_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Joins the pieces of one node and head. Grid (M, H)."""
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if node >= tl.load(offsets_ptr + num_requests):  # after the last request: no pieces
        return
    piece, dim = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    row = (piece.to(tl.int64) * num_nodes + node) * HEADS + head
    lse = tl.load(part_lse_ptr + row, mask=piece < PIECES, other=float("-inf"))
    weights = tl.exp(lse - tl.max(lse, axis=0))  # finite: a node sees itself
    mask = (piece < PIECES)[:, None] & (dim < WIDTH)[None, :]
    part = tl.load(part_ptr + row[:, None] * WIDTH + dim[None, :], mask=mask, other=0.0)
    mean = tl.sum(weights[:, None] * part, axis=0) / tl.sum(weights, axis=0)
    out_ptrs = out_ptr + node * o_node_stride + head * o_head_stride + dim
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=dim < WIDTH)


# --8<-- [end:combine]


# --8<-- [start:choose]
def choose_pieces(programs: int, most_keys: int) -> int:
    """Chooses a number of pieces that fills the GPU about twice, with at least four tiles each.

    Args:
        programs: Number of programs of step 4.
        most_keys: Slots per row of the page table. The host knows it without reading lengths from the device.

    Returns:
        The number of pieces.
    """
    return max(1, min(2 * PROCESSORS // programs, most_keys // (4 * BLOCK_N), MOST_PIECES))


# --8<-- [end:choose]


def attend(*batch: Tensor, scale: float, pieces: int) -> tuple[Tensor, Tensor]:
    """First launch: part [PIECES, M, H, D] and part_lse [PIECES, M, H]."""
    query, key_cache, value_cache, page_table, lengths, offsets, ancestors = batch
    nodes, heads, width = query.shape
    page_size, kv_heads = key_cache.shape[1:3]
    part = torch.empty(pieces, nodes, heads, width, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(pieces, nodes, heads, dtype=torch.float32, device=query.device)
    attend_kernel[(blocks_of(offsets), heads, len(lengths) * pieces)](
        query, key_cache, value_cache, page_table, lengths, offsets, ancestors, part, part_lse, scale,
        *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], page_table.stride(0),
        nodes, ancestors.shape[1],
        HEADS=heads, GROUP=heads // kv_heads, PAGE_SIZE=page_size, WIDTH=width, PIECES=pieces,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(width)),
    )  # fmt: skip
    return part, part_lse


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    ancestors: Tensor,
    *,
    scale: float,
    pieces: int | None = None,
) -> Tensor:
    """Arguments and result as in step 4; pieces: into how many the keys of a request are cut."""
    nodes, heads, width = query.shape
    if pieces is None:
        most_keys = page_table.shape[1] * key_cache.shape[1]
        pieces = choose_pieces(blocks_of(offsets) * heads * len(lengths), most_keys)
    batch = query, key_cache, value_cache, page_table, lengths, offsets, ancestors
    part, part_lse = attend(*batch, scale=scale, pieces=pieces)
    out = torch.zeros_like(query)
    combine_kernel[(nodes, heads)](
        part, part_lse, offsets, out, len(lengths), nodes, *out.stride()[:2],
        HEADS=heads, WIDTH=width, PIECES=pieces, BLOCK_P=triton.next_power_of_2(pieces),
        BLOCK_D=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def three_pieces(*batch: Tensor, scale: float) -> Tensor:
    """Step 5 where a batch is too small for `choose_pieces` to cut it."""
    query, key_cache, value_cache, page_table, lengths, offsets, ancestors = batch
    return tree_attention(query, key_cache, value_cache, page_table, lengths, offsets, ancestors, scale=scale, pieces=3)


def main() -> None:
    """Prints the partial results of one node, then the difference to step 4."""
    worked_example.interpret_without_gpu()
    batch = worked_example.to(worked_example.ragged(), worked_example.triton_device())
    part, part_lse = attend(*batch, scale=worked_example.scale_of(batch), pieces=3)
    node = batch.query.shape[0] - 1
    print(f"last node of the ragged batch, head 0: pieces of {BLOCK_N} keys")
    print("piece  log of sum  weight  mean (first 4 of 16 numbers)")
    shares = torch.softmax(part_lse[:, node, 0], dim=0)
    for piece, (lse, share, mean) in enumerate(zip(part_lse[:, node, 0], shares, part[:, node, 0])):
        numbers = " ".join(f"{number:6.3f}" for number in mean[:4].tolist())
        print(f"{piece:5}  {float(lse):10.3f}  {float(share):6.3f}  {numbers}")
    joined = (shares[:, None] * part[:, node, 0]).sum(dim=0)
    print("joined                    ", " ".join(f"{number:6.3f}" for number in joined[:4].tolist()))
    worked_example.report("step 4", step4_triton.tree_attention, three_pieces, worked_example.triton_device())


if __name__ == "__main__":
    main()
